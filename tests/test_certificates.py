"""The recorded certificates: the terms of each row belong together, and are those of SMART on the test split."""

from itertools import pairwise

import pandas as pd
import pytest

from smartlib import SMART, certificate, soft_ece
from smartlib.data import Bundle
from smartlib.data.synthetic import Population
from smartlib.experiments import certificates
from smartlib.experiments.certificates import certificate_table


@pytest.fixture(scope="module")
def bundle():
    population = Population(n_classes=5, slope=0.6, shift=0.2)
    return Bundle("synthetic", population.sample(2000, seed=0), population.sample(1500, seed=1))


@pytest.fixture
def table(bundle, tmp_path, monkeypatch):
    monkeypatch.setenv("SMARTLIB_FIGURES_DIR", str(tmp_path))
    monkeypatch.setattr(certificates, "load", lambda name: bundle)
    monkeypatch.setattr(certificates, "N_BINS", (5, 15))
    monkeypatch.setattr(certificates, "BANDWIDTHS", (0.02, 0.05))
    return certificate_table(["synthetic"], "p")


def test_every_row_is_a_chain(table, tmp_path):
    assert len(table) == 2 * 2 * 2
    for smaller, larger in pairwise(["smce", "bound", "bound_mean", "bound_sup", "paper_bound"]):
        assert (table[smaller] <= table[larger] + 1e-9).all()
    assert table["smce"].nunique() == table["ece"].nunique() == 1, "they do not depend on the settings of the bound"
    assert (table["ece"] < table["uncalibrated_ece"]).all()
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "records" / "p_certificates.csv"), table)


def test_a_row_is_the_certificate_of_smart_on_the_test_split(table, bundle):
    smart = SMART().fit(bundle.val.logits, bundle.val.labels)
    probs = smart.predict_proba(bundle.test.logits)
    f, a = probs.max(axis=1), probs.argmax(axis=1) == bundle.test.labels
    row = table[(table["n_bins"] == 15) & (table["bandwidth"] == 0.05) & (table["delta"] == 0.01)].iloc[0]
    expected = certificate(f, a, 15, 0.05, 0.01)
    for name in ("smce", "soft_ece", "kernel_error", "bound", "paper_bound"):
        assert row[name] == pytest.approx(getattr(expected, name), rel=1e-6)
    assert row["plain"] == pytest.approx(soft_ece(f, a, delta=0.0), rel=1e-6)
    assert row["n"] == 1500
