"""Moments of every kind are seconds since 1970, UTC unless they have a zone."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone

import numpy as np
import pytest
import torch

from gramtower.data import splits
from gramtower.data.ids import moment, moments
from gramtower.data.interactions import Interactions

EAST = timezone(timedelta(hours=2))


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (86400, 86400),
        (np.float32(1.5), 1.5),
        (date(1970, 1, 2), 86400),
        (datetime(1970, 1, 2, 0, 0, 1, 500_000), 86401.5),
        (datetime(1970, 1, 2, tzinfo=UTC), 86400),
        (datetime(1970, 1, 2, tzinfo=EAST), 86400 - 7200),
        (np.datetime64("1970-01-02"), 86400),
        (np.datetime64("1970-01-01T00:00:00.25"), 0.25),
        ("1970-01-02", 86400),
        ("1970-01-02T00:00:00+02:00", 86400 - 7200),
        ("1970-01-02T00:00:00Z", 86400),
    ],
)
def test_a_moment_is_seconds_since_1970(value, seconds):
    assert moment("cut", value) == seconds
    assert moments("time", [value]).tolist() == [seconds]


def test_missing_times_are_nan_and_others_are_refused():
    assert np.isnan(moments("time", [None, np.datetime64("NaT"), float("nan")])).all()
    assert np.isnan(moments("time", np.array(["NaT"], "datetime64[ns]"))).all()
    for wrong in ("soon", b"1", True, None, np.datetime64("NaT"), [1], float("inf")):
        with pytest.raises(ValueError, match="cut"):
            moment("cut", wrong)
    for wrong in ("1970-01-02", 3, [[datetime(1970, 1, 1)]], [object()]):
        with pytest.raises(ValueError, match="time"):
            moments("time", wrong)


@pytest.mark.parametrize("cut", [datetime(1970, 1, 2), date(1970, 1, 2), np.datetime64("1970-01-02"), "1970-01-02"])
def test_splits_by_time_take_dates(cut):
    times = [datetime(1970, 1, 1), datetime(1970, 1, 2), datetime(1970, 1, 3, tzinfo=UTC)]
    split = splits.by_time(Interactions.from_arrays([1, 1, 2], [1, 2, 1], time=times), cut=cut)
    assert (split.train.times.tolist(), split.test.times.tolist()) == ([0.0], [86400.0, 172800.0])


def test_pandas_times_are_taken():
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    for zone in (None, "UTC"):
        series = pandas.Series(pandas.to_datetime(["1970-01-02", "1970-01-03"])).dt.tz_localize(zone)
        assert moments("time", series).tolist() == [86400, 172800]
        assert moment("cut", series[0]) == 86400
    assert np.isnan(moments("time", [pandas.NaT])).all()


def test_a_sparse_tensor_is_refused_by_name():
    with pytest.raises(ValueError, match=r"time:.*torch\.sparse_coo"):
        moments("time", torch.eye(3).to_sparse())
