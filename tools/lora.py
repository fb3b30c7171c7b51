"""A tiny random model, its tokenizer and data of real text, made here: nothing is downloaded."""

import json
import sysconfig
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 512
END = "<end>"
SEED = 5
ROW_CHARACTERS = 160
ROWS = {"train": 480, "valid": 48, "test": 48}
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": True,
}


def make_model(folder: Path, *, seed: int = SEED) -> Path:
    """A folder that `mlx_lm.load` takes; other seeds make other weights."""
    folder.mkdir(parents=True, exist_ok=True)
    mx.random.seed(seed)
    model = llama.Model(llama.ModelArgs.from_dict(CONFIG))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [source_text()],
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=[END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    fast.save_pretrained(folder)
    return folder


def make_data(folder: Path) -> Path:
    """{train, valid, test}.jsonl of the standard library's sources."""
    folder.mkdir(parents=True, exist_ok=True)
    text, at = source_text(), 0
    for name, count in ROWS.items():
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for row in range(count):
                # Rows of different lengths: ranks have different numbers of tokens.
                length = ROW_CHARACTERS - 12 * (row % 9)
                file.write(json.dumps({"text": text[at : at + length]}) + "\n")
                at += length
    return folder


def source_text() -> str:
    """Some 120,000 characters of Python."""
    library = Path(sysconfig.get_paths()["stdlib"])
    names = ("argparse.py", "ast.py", "calendar.py")
    return "".join((library / name).read_text(encoding="utf-8") for name in names)[:120_000]


def tiny(folder: Path) -> None:
    """Make a tiny random model and data to fine-tune it with; nothing is downloaded.

    Args:
        folder: Where; the model goes to `model` in it, the data to `data`.
    """
    model, data = make_model(folder / "model"), make_data(folder / "data")
    print(f"a model of 0.2 million weights: {model}\nits data: {data}\n\ntype on each machine:")
    words = f"--model {model} --data {data} --train --iters 100 --batch-size 4 --num-layers 4"
    print(f"pmesh mlx mlx_lm.lora {words} --adapter-path {folder / 'adapters'}")
