"""Rank 0 alone shows progress, and only while there are several ranks."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import keras_ring as kr


def run_all(model: Any) -> None:
    x, y = np.ones((4, 2)), np.ones((4, 1))
    model.fit(x, y, epochs=2, verbose=2)
    model.evaluate(x, y, verbose=2)
    model.predict(x, verbose=2)


@pytest.fixture(scope="module")
def model() -> Any:
    built = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    built.compile("sgd", "mse")
    return built


def test_only_rank_0_shows_progress(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run_all(model)

    shown = capsys.readouterr().out
    if kr.rank() == 0:
        assert "Epoch 1/2" in shown
        assert shown.count("1/1") == 4
    else:
        assert shown == ""


def test_what_the_user_asked_for_is_kept_for_other_callbacks(model: Any) -> None:
    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            seen.append(self.params["verbose"])

    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=2, callbacks=[Look()])

    assert seen == [2]


def test_every_process_shows_progress_after_shutdown(
    model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    kr.shutdown()
    try:
        run_all(model)
    finally:
        kr.init()

    assert capsys.readouterr().out.count("1/1") == 4
