"""Makes Inductor run the pass on FlexAttention backwards in every model that is compiled from now on."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from flashbwd.integrations.inductor import FlexGradients

__all__ = ["install", "remove"]


class _Installed(CustomGraphPass):
    """Runs the pass that was set before, and then ``FlexGradients`` as long as it is active."""

    def __init__(self, before: Any) -> None:
        self.before = before
        self.active = True
        self._pass = FlexGradients()

    def __call__(self, graph: fx.Graph) -> None:
        if self.before is not None:
            self.before(graph)
        if self.active:
            self._pass(graph)

    def uuid(self) -> Any:
        """Return a key for Inductor's cache. None, which disables the cache, if the other pass has none."""
        key: list[Any] = ["active", self._pass.uuid()] if self.active else ["inactive"]
        if self.before is not None:
            before = self.before.uuid() if isinstance(self.before, CustomGraphPass) else None
            if not before:
                return None
            key.append(before)
        return tuple(key)


def install() -> _Installed:
    """Let Inductor run the pass. A pass that the user has set runs before it."""
    from torch._inductor import config

    installed = _Installed(config.post_grad_custom_pre_pass)
    config.post_grad_custom_pre_pass = installed
    return installed


def remove(installed: _Installed) -> None:
    """Undo :func:`install`. If another pass was set in the meantime, that one stays."""
    from torch._inductor import config

    installed.active = False
    if config.post_grad_custom_pre_pass is installed:
        config.post_grad_custom_pre_pass = installed.before
