"""Experiments: the cells of the tables, the values of the paper, and the runner of the notebooks."""
