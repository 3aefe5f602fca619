"""The partitioner: of a joint graph, what forward hands to backward, by the policy."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from leangrad import __version__, _torch_compile
from leangrad.compiled.joint_graph import read_joint_graph
from leangrad.policy.choice import Choice, choose

__all__ = ["Partitioner", "Settings"]


@dataclass(frozen=True)
class Settings:
    """What a user may say; all of it is part of the key of torch's compile caches."""

    exact: bool = False
    slowdown: float = 1.1


class Partitioner(CustomPartitionerFn):
    """AOTAutograd's partitioner with the policy's cut. Everything around the cut is torch's own."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Partition one joint graph."""
        with _torch_compile.choosing(self._keep):
            return _torch_compile.partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        """What tells this partitioner from another in the caches: its settings, and the code of the policy."""
        return f"leangrad {__version__} {_code()} {asdict(self.settings)}"

    def _keep(self, graph: fx.Graph, info: Any) -> list[fx.Node]:
        step, nodes = read_joint_graph(graph, info, fused=not self.settings.exact)
        choice = choose(step, slowdown=self.settings.slowdown)
        chosen.append(choice)
        del chosen[:-REMEMBERED]
        return [nodes[n] for n in sorted(choice.kept)]


REMEMBERED = 64
chosen: list[Choice] = []  # of the last graphs that were compiled, for the summary


def _code() -> str:
    """A digest of the code that chooses: another version of it must not be served another's graphs."""
    digest = hashlib.sha256()
    here = Path(__file__).parent
    for path in sorted([*here.glob("*.py"), *(here.parent / "policy").glob("*.py"), here.parent / "_torch_compile.py"]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
