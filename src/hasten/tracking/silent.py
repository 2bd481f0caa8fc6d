"""The stand-in for a tracker on processes where it does not run."""

from __future__ import annotations


class Silent:
    """Takes any call and any attribute and does nothing; false in a condition."""

    def __getattr__(self, name: str) -> Silent:
        if name.startswith("__"):  # copy, pickle and inspect look for protocols; there are none
            raise AttributeError(name)
        return self

    def __call__(self, *args: object, **kwargs: object) -> Silent:
        return self

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "<tracker of another process>"
