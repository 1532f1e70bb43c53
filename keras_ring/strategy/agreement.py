"""Agreeing with the other ranks, in eager code, on what is done next within a scope."""

from __future__ import annotations

import functools

from keras_ring.fitting import agreement

agree = functools.partial(agreement.agree, agreement.SCOPE)
gather = functools.partial(agreement.gather, agreement.SCOPE)
