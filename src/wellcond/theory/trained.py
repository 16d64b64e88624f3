"""Matrices of a trained model's blocks, kept in a small safetensors file, for statements about trained weights.

    blocks = read_blocks(["evidence/trained/digits-vit-blocks.safetensors"])
    x, wq, wk, wv = blocks[0].attention()     # (images, n, d) and (images, d, d), float64

The file has, for each block `NAME`: `NAME.x` (images, n, d), the attention's normed input; `NAME.w_q`, `.w_k`, `.w_v`
(heads, d, d/heads), multiplied from the right; and, if the MLP was saved, `NAME.x_mlp`, `NAME.w_up`, `NAME.w_down`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

__all__ = ["TrainedBlock", "describe", "read_blocks"]


@dataclass(frozen=True, kw_only=True)
class TrainedBlock:
    name: str
    tensors: dict[str, Tensor]

    @property
    def heads(self) -> int:
        return self.tensors["w_q"].shape[0]

    def attention(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return X and the packed W_Q, W_K, W_V, which are repeated for every image."""
        x = self.tensors["x"].double()
        packed = (self.tensors[name].double().movedim(0, 1).flatten(1) for name in ("w_q", "w_k", "w_v"))
        q, k, v = (w.expand(len(x), -1, -1) for w in packed)
        return x, q, k, v

    def queries_and_keys(self) -> tuple[Tensor, Tensor]:
        """Return queries and keys, (images, heads, n, p) each."""
        x = self.tensors["x"].double()[:, None]
        return x @ self.tensors["w_q"].double(), x @ self.tensors["w_k"].double()

    def mlp(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the MLP's normed input, W_up and W_down, repeated for every image; None if the file has none."""
        if "w_up" not in self.tensors:
            return None
        x, up, down = (self.tensors[name].double() for name in ("x_mlp", "w_up", "w_down"))
        return x, up.expand(len(x), -1, -1), down.expand(len(x), -1, -1)


def read_blocks(paths: Sequence[str | Path]) -> list[TrainedBlock]:
    """Read the blocks of one file, or of several with parts of the same blocks. Raises ValueError for other files."""
    found: dict[str, dict[str, Tensor]] = {}
    for path in paths:
        try:
            with safe_open(path, "pt") as file:
                for key in file.keys():  # noqa: SIM118 (not a dict)
                    block, _, name = key.rpartition(".")
                    found.setdefault(block, {})[name] = file.get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} is no safetensors file of trained blocks ({error})") from None
    for block, tensors in found.items():
        missing = {"x", "w_q", "w_k", "w_v"} - tensors.keys()
        if missing:
            raise ValueError(f"{block or 'a block'} of {', '.join(map(str, paths))} lacks {', '.join(sorted(missing))}")
    return [TrainedBlock(name=name, tensors=tensors) for name, tensors in sorted(found.items())]


def describe(paths: Sequence[str | Path]) -> str:
    """Describe model and source from the files' metadata; parts of one model are named once."""
    said: dict[str, None] = {}
    for path in paths:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
        said["; ".join(about[key] for key in ("model", "source") if key in about) or Path(path).name] = None
    return " and ".join(said) or "none was given"
