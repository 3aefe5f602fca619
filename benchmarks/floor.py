"""Print the floor of models of the zoo: `leangrad.floor` from the command line.

python -m benchmarks.floor --case gpt [--autocast bfloat16]
"""

import argparse

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

import leangrad
from tests.zoo import case


def main() -> None:
    """Print the floor of models of the zoo."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.floor", description=main.__doc__)
    parser.add_argument("--case", nargs="+", required=True, metavar="NAME", help="cases of tests/zoo")
    parser.add_argument("--autocast", choices=("bfloat16", "float16"), help="dtype of autocast; none by default")
    parser.add_argument("--device", default="cpu")
    chosen = parser.parse_args()
    for name in chosen.case:
        torch.manual_seed(0)
        one = case(name)
        model = one.make().to(chosen.device)
        batch = tree_map(lambda leaf: leaf.to(chosen.device) if isinstance(leaf, Tensor) else leaf, one.batch())
        dtype = None if chosen.autocast is None else getattr(torch, chosen.autocast)
        print(f"{name}\n{leangrad.floor(model, batch, one.loss, autocast=dtype)}")


if __name__ == "__main__":
    main()
