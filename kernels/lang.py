"""Triton if it is there, placeholders that refuse to launch if not: the one file that imports it.

Write `from ..kernels.lang import tl, triton` and decorate with `@triton.jit`. Without Triton the
decorated function still loads, so a stage file imports on any machine, and only a launch raises
`TritonMissingError`.
"""

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NoReturn

__all__ = [
    "HAS_TRITON",
    "INTERPRETED",
    "TritonMissingError",
    "gdc_launch_dependents",
    "gdc_wait",
    "tl",
    "triton",
]

HAS_TRITON = find_spec("triton") is not None
# Kernels run in Python, on tensors of the CPU. Read once, as Triton itself does.
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on")


class TritonMissingError(RuntimeError):
    """A Triton kernel was launched on a machine without Triton."""


class _Unlaunchable:
    """Stands for a jitted function: it keeps the name, and any launch or call raises."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.fn = function
        self.__name__ = function.__name__

    def __getitem__(self, grid: object) -> NoReturn:
        self._refuse()

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise TritonMissingError(
            f"kernel {self.__name__!r} needs Triton, which is not installed; "
            "install triton>=3.6, or use the reference implementation"
        )


class _TritonPlaceholder:
    """The part of `triton` that a module touches while it loads."""

    def jit(self, function: Callable[..., Any] | None = None, **options: object) -> Any:
        """Decorate with or without options, as `triton.jit`."""
        return _Unlaunchable if function is None else _Unlaunchable(function)

    def cdiv(self, x: int, y: int) -> int:
        """Divide and round up."""
        return -(-x // y)

    def next_power_of_2(self, n: int) -> int:
        """Return the smallest power of two that is at least n."""
        return 1 << max(n - 1, 0).bit_length()


class _LanguagePlaceholder:
    """The part of `triton.language` that a module touches while it loads: types in annotations."""

    @staticmethod
    def constexpr(value: Any) -> Any:
        """Stand for a constant of a kernel, or for the type of one in an annotation."""
        return value

    def __getattr__(self, name: str) -> NoReturn:
        raise TritonMissingError(
            f"triton.language.{name} needs Triton, which is not installed; install triton>=3.6"
        )


if TYPE_CHECKING:

    class _Triton:
        """As much of Triton as a type checker has to know."""

        def jit(self, function: Callable[..., Any] | None = None, **options: Any) -> Any: ...
        def __getattr__(self, name: str) -> Any: ...

    triton = _Triton()
    tl: Any
elif HAS_TRITON:
    import triton
    import triton.language as tl
else:
    triton = _TritonPlaceholder()
    tl = _LanguagePlaceholder()

gdc_wait: Any = None
gdc_launch_dependents: Any = None
if HAS_TRITON and not INTERPRETED:
    from triton.language.extra import cuda

    gdc_wait = cuda.gdc_wait
    gdc_launch_dependents = cuda.gdc_launch_dependents
