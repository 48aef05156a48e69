"""`checkpoints export --to hf`, loaded by the real transformers: tiny models, made here."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="transformers isn't installed (make setup)")

from safetensors import safe_open  # noqa: E402

from powerguard.checkpoint import Checkpointer, export, find  # noqa: E402
from powerguard.cli import run  # noqa: E402
from powerguard.errors import CheckpointError, DirectoryError, UsageError  # noqa: E402
from powerguard.integrations.huggingface import ModelConfig, PowerguardCallback  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

SMALL = {"vocab_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
WIDE = {**SMALL, "hidden_size": 16, "intermediate_size": 16}
MODELS = {
    "GPT2": ("AutoModelForCausalLM", {**SMALL, "n_embd": 16, "n_positions": 16}),  # one tied name
    "Bert": ("AutoModelForMaskedLM", WIDE),  # a tied bias, too
    "T5": ("AutoModelForSeq2SeqLM", {**SMALL, "d_model": 16, "d_kv": 8, "d_ff": 16}),  # three names of one
    "Llama": ("AutoModelForCausalLM", WIDE),  # none
    "Mixtral": ("AutoModelForCausalLM", {**WIDE, "num_key_value_heads": 2, "num_local_experts": 2}),  # renamed in files
}


def build(name):
    torch.manual_seed(1)
    auto, options = MODELS[name]
    return getattr(transformers, auto).from_config(getattr(transformers, f"{name}Config")(**options))


def save(folder, state, step=5):
    with Checkpointer(folder) as saver:
        return find(saver.save(state, step))


def names(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        return set(file.keys())


def loaded(name, folder):
    """What stock transformers makes of *folder*; nothing was missing or too much."""
    model, told = getattr(transformers, MODELS[name][0]).from_pretrained(folder, output_loading_info=True)
    assert not any(told.values()), told
    return model.state_dict()


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_a_plain_state_becomes_what_save_pretrained_writes(tmp_path, name, recorded):
    """The same names (what is tied stands once) and configuration, recorded or given; it loads to the bit."""
    model = build(name)
    model.save_pretrained(tmp_path / "theirs")
    state = {"model": model} | ({"config": ModelConfig(model)} if recorded else {})

    export(save(tmp_path / "run", state), tmp_path / "ours", "hf", config=None if recorded else tmp_path / "theirs")

    assert same(model.state_dict(), loaded(name, tmp_path / "ours"))
    if name != "Mixtral":  # whose experts save_pretrained takes apart, as files of older versions have them
        assert names(tmp_path / "theirs") == names(tmp_path / "ours")
    for file in (tmp_path / "theirs").glob("*.json"):
        assert json.loads(file.read_text()) == json.loads((tmp_path / "ours" / file.name).read_text())
    assert {path.name for path in (tmp_path / "ours").iterdir()} == {
        path.name for path in (tmp_path / "theirs").iterdir()
    }


def test_what_a_model_never_saves_stays_out(tmp_path):
    """`_keys_to_ignore_on_save`, as save_pretrained has it."""
    model = build("GPT2")
    model._keys_to_ignore_on_save = ["transformer.wpe.weight"]
    model.save_pretrained(tmp_path / "theirs")
    export(save(tmp_path / "run", {"model": model, "config": ModelConfig(model)}), tmp_path / "ours", "hf")

    assert names(tmp_path / "theirs") == names(tmp_path / "ours")


class Watch(transformers.TrainerCallback):
    """Keeps the weights of step 4."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 4:
            self.weights = {key: value.clone() for key, value in kwargs["model"].state_dict().items()}


def test_a_trainers_run_is_exported_from_the_command_line(tmp_path, capsys):
    """The callback has recorded the configuration; the folder is the model as it was after that step."""
    model, watch = build("GPT2"), Watch()
    data = [{"input_ids": row, "labels": row} for row in torch.randint(64, (16, 8))]
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path / "trainer"), max_steps=4, per_device_train_batch_size=2, learning_rate=0.1,
        save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    guard = PowerguardCallback(tmp_path / "run", save_every=2, reserve=False)
    transformers.Trainer(model=model, args=args, train_dataset=data, callbacks=[watch, guard]).train()
    capsys.readouterr()

    assert run(["checkpoints", "export", str(tmp_path / "run"), str(tmp_path / "out"), "--to", "hf"]) == 0
    assert "left out: random states of 1 ranks, optimizer, scheduler, trainer" in capsys.readouterr().out
    assert same(watch.weights, loaded("GPT2", tmp_path / "out"))


@pytest.mark.parametrize("sharded", [True, False])
def test_a_wrapped_model_is_put_together(tmp_path, sharded):
    """FSDP2's parts of a tied weight, each of them once; DDP's names without what DDP puts before them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = build("GPT2")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        if sharded:
            fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        else:
            model = torch.nn.parallel.DistributedDataParallel(model)
        generation = save(tmp_path / "run", {"model": model, "config": ModelConfig(model)})
    finally:
        torch.distributed.destroy_process_group()
    export(generation, tmp_path / "out", "hf")

    assert "lm_head.weight" not in names(tmp_path / "out")
    assert same(before, loaded("GPT2", tmp_path / "out"))


def test_a_part_of_a_source_can_be_the_model(tmp_path):
    """As in a module of Lightning, which holds it as an attribute."""
    model = build("GPT2")
    outer = torch.nn.ModuleDict({"net": model, "head": torch.nn.Linear(2, 2)})
    generation = save(tmp_path / "run", {"module": outer, "other": torch.nn.Linear(2, 2), "c": ModelConfig(model)})

    with pytest.raises(CheckpointError, match="several models in it: module, other"):
        export(generation, tmp_path / "out", "hf")
    export(generation, tmp_path / "out", "hf", model="module.net")

    assert same(model.state_dict(), loaded("GPT2", tmp_path / "out"))


def test_what_is_no_hugging_face_model_is_refused(tmp_path):
    """Each with what to do about it, and nothing is left behind."""
    linear = torch.nn.Linear(2, 2)
    adapted = torch.nn.ModuleDict({"lora_A": torch.nn.Linear(2, 2)})
    quantised = build("GPT2")
    quantised.config.quantization_config = {"quant_method": "bitsandbytes"}
    cases = {
        "there is no model in it": ({"weights": [torch.ones(2)]}, {}),
        "no Hugging Face config is recorded with model": ({"model": linear}, {}),
        "holds no tensors": ({"model": linear}, {"model": "model.net"}),
        "there is no source 'net' in it, but model": ({"model": linear}, {"model": "net"}),
        "with adapters": ({"model": torch.nn.ModuleDict({"q": adapted}), "c": ModelConfig(build("GPT2"))}, {}),
        "is quantised": ({"model": quantised, "c": ModelConfig(quantised)}, {}),
    }
    for number, (words, (state, options)) in enumerate(cases.items()):
        generation = save(tmp_path / f"run-{number}", state)
        with pytest.raises(CheckpointError, match=words) as raised:
            export(generation, tmp_path / "out", "hf", **options)
        assert raised.value.todo
    assert not (tmp_path / "out").exists()


def test_mistakes_of_the_caller_are_told(tmp_path):
    """A configuration that is none, options of another format, a folder that isn't there; nothing is left behind."""
    generation = save(tmp_path / "run", {"model": torch.nn.Linear(2, 2)})
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "good.json").write_text('{"model_type": "gpt2"}')
    before = sorted(tmp_path.iterdir())
    for config in ("list.json", "none.json", "run"):
        with pytest.raises(UsageError, match="model's config"):
            export(generation, tmp_path / "out", "hf", config=tmp_path / config)
    with pytest.raises(UsageError, match="for hf only"):
        export(generation, tmp_path / "out", "dcp", model="model")
    with pytest.raises(DirectoryError, match="can't export to"):
        export(generation, tmp_path / "missing" / "out", "hf", config=tmp_path / "good.json")
    assert sorted(tmp_path.iterdir()) == before
