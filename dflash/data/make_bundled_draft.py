"""Makes the bundled draft from the trainer's bf16 checkpoint: linear layers in 8 bits, one file, same names.

    python -m dflash.data.make_bundled_draft SEED_FOLDER OUTPUT_FOLDER

Eight bits halve the size that every clone pays for. The norms, under 0.1 % of the weights, stay in bf16. The
README beside the weights says how the draft was trained; this script does not touch it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import mlx.core as mx

BITS, GROUP_SIZE = 8, 64


def main(seed: Path, output: Path) -> None:
    config = json.loads((seed / "config.json").read_text())
    tensors = {name: a for file in seed.glob("*.safetensors") for name, a in mx.load(str(file)).items()}
    output.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(output / "model.safetensors"), quantised(tensors), metadata={"format": "mlx"})
    config["quantization"] = {"group_size": GROUP_SIZE, "bits": BITS}
    (output / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def quantised(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """Every matrix as MLX's affine triple (weight, scales, biases); vectors as they are."""
    result = {}
    for name, array in sorted(tensors.items()):
        if array.ndim != 2:
            result[name] = array
            continue
        path = name.removesuffix(".weight")
        parts = mx.quantize(array, group_size=GROUP_SIZE, bits=BITS)
        result |= {f"{path}.{part}": a for part, a in zip(("weight", "scales", "biases"), parts, strict=True)}
    return result


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
