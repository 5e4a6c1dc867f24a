"""Shape annotations: `Float[Tensor, "batch classes"]` reads as a tensor and, under the tests, is checked.

jaxtyping is a development dependency. Without it an annotation is just the array type it names, so
nothing is checked and nothing is slower for those who only use the package.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or find_spec("jaxtyping"):
    from jaxtyping import Bool, Float, Int, UInt8
else:

    class _AnyShape:
        def __class_getitem__(cls, item: tuple[Any, str]) -> Any:
            return item[0]

    Bool = Float = Int = UInt8 = _AnyShape

__all__ = ["Bool", "Float", "Int", "UInt8"]
