"""What is measured of calibrators and metrics: the data, one measurement, and the table."""

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from scipy.special import softmax

from smartlib import expected_calibration_error
from smartlib.experiments import cost
from smartlib.metrics import top_label


def test_the_data_are_logits_of_the_head_twice_as_large_as_calibrated_ones():
    logits, labels, features, (weight, bias) = cost.synthetic_logits(5000, 10)
    assert logits.shape == (5000, 10) and logits.dtype == np.float32
    np.testing.assert_allclose(logits, features @ weight.T + bias, rtol=1e-4, atol=1e-4)
    calibrated = softmax(logits / 2, axis=1)
    assert expected_calibration_error(*top_label(calibrated, labels)) < 0.02
    assert expected_calibration_error(*top_label(softmax(logits, axis=1), labels)) > 0.05


@pytest.mark.parametrize("what", ["ts", "procal", "fc", "kde_ece", "soft_ece"])
def test_a_measurement_has_seconds_and_the_size_of_its_input(what):
    found = cost.measure(what, 600, 5)
    features = 600 * cost.N_FEATURES * 4 if what in ("procal", "fc") else 0
    assert found["input_megabytes"] == pytest.approx((600 * 5 * 4 + features) / 1e6)
    assert found["use_seconds"] > 0 and found["peak_megabytes"] >= 0
    assert (found["fit_seconds"] > 0) if what in ("ts", "procal", "fc") else np.isnan(found["fit_seconds"])


def test_the_table_has_a_row_per_size_and_a_second_run_replaces_its_rows(tmp_path, monkeypatch):
    monkeypatch.setenv("SMARTLIB_FIGURES_DIR", str(tmp_path))
    monkeypatch.setattr(cost, "SIZES", ((300, 4),))
    for chosen in (["ts", "ece"], ["ts"]):
        run = CliRunner().invoke(cost.main, chosen, catch_exceptions=False)
        assert run.exit_code == 0
        table = pd.read_csv(tmp_path / "records" / "cost.csv")
        assert sorted(table[["what", "n", "classes"]].values.tolist()) == [["ece", 300, 4], ["ts", 300, 4]]
