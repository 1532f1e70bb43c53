"""The examples in the docstrings run, and print what they say they print."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_ring as kr

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(kr.__path__, "keras_ring.")
    if not module.name.startswith("keras_ring.launch")
)


@pytest.fixture(scope="module", autouse=True)
def _world_of_one():
    kr.init()
    yield
    kr.shutdown()


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_module_run(name):
    if not kr.is_initialized():
        kr.init()
    failed, _ = doctest.testmod(
        importlib.import_module(name),
        extraglobs={"keras": keras, "keras_ring": kr, "kr": kr, "np": np, "tf": tf},
        optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE,
    )
    assert failed == 0


def test_examples_are_found():
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = finder.find(importlib.import_module("keras_ring.collectives.movements"))
    assert sum(len(test.examples) for test in found) >= 5
