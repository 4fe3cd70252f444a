"""The dense part of a step: precision, torch.compile and fused optimizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.run import Ads, World, differing

import thermocline as tc
from thermocline.batch import Batch
from thermocline.embedding.state_dict import dense_state_dict
from thermocline.training import dense_optimizers
from thermocline.training.callbacks import Callback
from thermocline.training.dense_step import DenseStep, precision_text
from thermocline.training.trainer import TrainConfig, Trainer

TRAIN = Ads(6)
QUIET: dict[str, Any] = {"display": False, "tensorboard": False, "checkpoint_minutes": None}
BCE = torch.nn.functional.binary_cross_entropy_with_logits
CUDA = torch.device("cuda")


def trainer_of(world: World, path: Path | None = None, callbacks: Any = (), **config: Any) -> Trainer:
    settings = TrainConfig(**{**QUIET, **config})
    return Trainer(world.model, world.optimizer, run_dir=path, config=settings, callbacks=callbacks)


def trained(**config: Any) -> dict[str, bytes]:
    world = World(None)
    trainer_of(world, **config).fit(TRAIN)
    return world.bits()


def weights_of(world: World) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in world.model.parameters()])


class Stop(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, trainer: Trainer, loss: torch.Tensor) -> None:
        if trainer.progress.step == self.step:
            trainer.save()
            trainer.stop()


# ---- precision


def test_bf16_equals_a_loop_with_autocast() -> None:
    world = World(None)
    for batch in TRAIN:
        with torch.autocast("cpu", torch.bfloat16):
            logits = world.model(batch)
        assert logits.dtype == torch.bfloat16
        BCE(logits.float(), batch.label).backward()
        for table in world.tables:
            table.step()
        world.optimizer.step()
        world.optimizer.zero_grad()
    bits = trained(dense_precision="bf16")
    assert differing(bits, world.bits()) == []
    assert "out.weight" in differing(bits, trained())


def test_bf16_keeps_rows_parameters_and_gradients_in_fp32() -> None:
    world = World(None)
    seen: list[torch.dtype] = []
    world.model.a.register_forward_hook(lambda module, args, rows: seen.append(rows.dtype))
    world.model.out.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.dtype))
    world.model.drop.register_forward_hook(lambda module, args, x: seen.append(x.dtype))
    step = DenseStep(world.model, world.tables, TrainConfig(dense_precision="bf16"))
    world.model.norm = torch.nn.Linear(14, 14)  # type: ignore[assignment]
    result = step.forward(TRAIN.batch(0), BCE)
    step.backward(result.loss)
    assert seen == [torch.float32, torch.bfloat16, torch.float32]
    assert result.logits.dtype == result.loss.dtype == torch.float32
    assert world.model.out.weight.dtype == torch.float32


def test_resumed_bf16_run_equals_uninterrupted_run(tmp_path: Path) -> None:
    expected = trained(dense_precision="bf16")
    world = World(None)
    trainer_of(world, tmp_path, [Stop(3)], dense_precision="bf16").fit(TRAIN)
    world.close()
    world = World(None)
    trainer_of(world, tmp_path, dense_precision="bf16").fit(TRAIN, resume=True)
    assert differing(world.bits(), expected) == []
    world.close()


def test_tf32_on_a_cpu_is_fp32() -> None:
    assert differing(trained(dense_precision="tf32"), trained()) == []
    cpu = torch.device("cpu")
    assert precision_text("tf32", False, cpu) == (
        "dense part in fp32 (tf32 needs a GPU of compute capability 8.0 or more)"
    )
    assert precision_text("bf16", True, cpu) == "dense part in bf16, compiled"
    assert precision_text("fp32", False, cpu) == ""


def test_start_of_a_run_names_the_effective_precision(tmp_path: Path) -> None:
    sets = {"data": tc.Data(format="synth"), "tiers": tc.Tiers(device="cpu", mem="16MB")}
    train = tc.Train(dense_precision="tf32", compile=True, run_dir=str(tmp_path))
    with tc.Run(tc.Config(train=train, **sets)) as run:  # type: ignore[arg-type]
        assert run.device_text.endswith(
            ", dense part in fp32 (tf32 needs a GPU of compute capability 8.0 or more), compiled"
        )


@pytest.mark.parametrize("outside", ["highest", "high"])
@pytest.mark.parametrize(("precision", "inside"), [("fp32", "ieee"), ("tf32", "tf32"), ("bf16", "ieee")])
def test_precision_of_matrix_products_is_set_for_the_step_only(precision: Any, inside: str, outside: str) -> None:
    world = World(None)
    step = DenseStep(world.model, world.tables, TrainConfig(dense_precision=precision))
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(outside)
        with step._arithmetic(CUDA):
            assert torch.backends.cuda.matmul.fp32_precision == inside
        assert torch.get_float32_matmul_precision() == outside
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.gpu
def test_tf32_and_bf16_change_products_on_a_gpu() -> None:
    results = {}
    for precision in ("fp32", "tf32", "bf16"):
        torch.manual_seed(0)
        table = tc.Table(64, tc.SGD(lr=0.1), hbm="16MB", mem="16MB", device="cuda")
        model = Products(table).to("cuda")
        step = DenseStep(model, [table], TrainConfig(dense_precision=precision))  # type: ignore[arg-type]
        results[precision] = step.forward(Ads(1).batch(0), BCE).logits.double().cpu()
        table.close()
    assert 0 < (results["tf32"] - results["fp32"]).abs().max() < (results["bf16"] - results["fp32"]).abs().max()


class Products(torch.nn.Module):
    def __init__(self, table: tc.Table) -> None:
        super().__init__()
        self.bag = tc.EmbeddingBag(table, 3)
        self.net = torch.nn.Sequential(torch.nn.Linear(192, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))

    def forward(self, batch: Batch) -> torch.Tensor:
        logits: torch.Tensor = self.net(self.bag(batch).flatten(1) * 100).squeeze(1)
        return logits


# ---- torch.compile


def test_compiled_run_resumes_with_the_same_bits_and_is_close_to_eager(tmp_path: Path) -> None:
    eager = World(None)
    eager.model.drop.p = 0.0
    trainer_of(eager).fit(TRAIN)
    bits = []
    for stop in (None, 3):
        path = tmp_path / str(stop)
        for resume in (False, True) if stop else (False,):
            world = World(None)
            world.model.drop.p = 0.0
            trainer = trainer_of(world, path, [] if resume or stop is None else [Stop(stop)], compile=True)
            trainer.fit(TRAIN, resume=resume)
            assert type(trainer._dense_step._run).__name__ == "OptimizedModule"
            if stop is None or resume:
                bits.append(world.bits())
                assert torch.allclose(weights_of(world), weights_of(eager), atol=1e-6)
            world.close()
    assert differing(*bits) == []


def test_compile_reports_a_missing_compiler_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    world = World(None)
    torch.compiler.reset()
    with config.patch({"cpp.cxx": ("/nonexistent/compiler",), "force_disable_caches": True}):
        step = DenseStep(world.model, world.tables, TrainConfig(compile=True))
        with pytest.raises(tc.ThermoclineError) as caught:
            step.forward(TRAIN.batch(0), BCE)
    text = str(caught.value)
    assert text.startswith("train.compile = true: torch.compile cannot compile Model: ")
    assert text.endswith("Set train.compile = false")
    assert "\n" not in text


def test_compile_refuses_many_batch_sizes() -> None:
    world = World(None)
    step = DenseStep(world.model, world.tables, TrainConfig(compile=True))
    for examples in range(1, 9):
        step._check_size(examples)
        step._check_size(examples)
    with pytest.raises(tc.ThermoclineError, match=r"compiles the model once per batch size, at most 8 times: 9 ex"):
        step._check_size(9)


@pytest.mark.parametrize("train", [True, False])
def test_bag_in_a_compiled_model_equals_eager(train: bool) -> None:
    """With and without the bag in the graph: a `DenseStep` compiles the rest of the model only."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    outputs = []
    for compiled in (False, True):
        world = World(None)
        world.model.train(train)
        run: Any = torch.compile(world.model, backend=counter, dynamic=False) if compiled else world.model
        logits = []
        for batch in TRAIN:
            logits.append(run(batch))
            if train:
                BCE(logits[-1], batch.label).backward()
                for table in world.tables:
                    table.step()
                world.optimizer.step()
                world.optimizer.zero_grad()
        outputs.append((torch.cat(logits).detach(), world.bits()))
    assert counter.frame_count >= 1
    assert counter.op_count >= 4, "cat, norm, dropout and linear are in compiled graphs"
    assert torch.equal(outputs[0][0], outputs[1][0])
    assert differing(outputs[0][1], outputs[1][1]) == []


# ---- fused optimizers


KINDS: dict[str, Any] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


@pytest.fixture
def fused_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let `use_fused` change optimizers of parameters on the CPU, for which torch has fused kernels too."""
    dense_optimizers._fused_on_gpu.cache_clear()
    monkeypatch.setattr(dense_optimizers, "_GPU", "cpu")
    yield
    dense_optimizers._fused_on_gpu.cache_clear()


def world_of(kind: str) -> World:
    world = World(None)
    world.optimizer = KINDS[kind](world.model.parameters())
    return world


@pytest.mark.parametrize("kind", KINDS)
def test_fused_optimizer_is_close_to_torchs_default(fused_on_cpu: None, kind: str) -> None:
    plain = world_of(kind)
    for batch in TRAIN:
        plain.step(batch)
    world = world_of(kind)
    trainer_of(world).fit(TRAIN)
    group = world.optimizer.param_groups[0]
    assert group["fused"] is True
    assert isinstance(group["lr"], torch.Tensor)
    assert group.get("capturable", True) is True
    assert torch.allclose(weights_of(world), weights_of(plain), atol=1e-6)


def test_optimizers_on_a_cpu_are_unchanged() -> None:
    world = World(None)
    dense_optimizers.use_fused([world.optimizer])
    group = world.optimizer.param_groups[0]
    assert (group["fused"], group["lr"], group["capturable"]) == (None, 0.01, False)


@pytest.mark.parametrize("flag", ["foreach", "fused"])
def test_explicit_implementation_of_an_optimizer_is_kept(fused_on_cpu: None, flag: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([parameter], **{flag: False})
    dense_optimizers.use_fused([optimizer])
    assert optimizer.param_groups[0]["lr"] == 0.001
    subclass = type("Own", (torch.optim.Adam,), {})([parameter])
    dense_optimizers.use_fused([subclass])
    assert subclass.param_groups[0]["fused"] is None


@pytest.mark.parametrize("kind", KINDS)
def test_saved_state_does_not_depend_on_the_implementation(fused_on_cpu: None, tmp_path: Path, kind: str) -> None:
    schedule = tc.Schedule(warmup_steps=4)
    whole = world_of(kind)
    trainer_of(whole, schedule=schedule).fit(TRAIN)
    world = world_of(kind)
    trainer_of(world, tmp_path, [Stop(3)], schedule=schedule).fit(TRAIN)
    saved = world.optimizer.state_dict()
    group = saved["param_groups"][0]
    assert group["fused"] is None
    assert group["initial_lr"] == {"adam": 0.01, "adamw": 0.01, "sgd": 0.1, "adagrad": 0.1}[kind]
    assert group["lr"] == group["initial_lr"] * schedule(2)
    assert isinstance(group["lr"], float)
    assert "rate" not in group
    fresh = world_of(kind)  # of the default implementation, such as in `thermocline eval`
    fresh.optimizer.load_state_dict(saved)
    assert fresh.optimizer.param_groups[0]["fused"] is None
    fresh.step(TRAIN.batch(0))
    world.close()
    world = world_of(kind)
    trainer_of(world, tmp_path, schedule=schedule).fit(TRAIN, resume=True)
    assert differing(world.bits(), whole.bits()) == []
    rate = world.optimizer.param_groups[0]["lr"]
    world.optimizer.load_state_dict(saved)
    assert world.optimizer.param_groups[0]["lr"] is rate, "captured graphs have its address"
    world.close()


def test_state_of_the_default_implementation_continues_fused(fused_on_cpu: None, tmp_path: Path) -> None:
    """Checkpoints of earlier versions have it."""
    world = World(None)
    dense_optimizers._fused_on_gpu.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense_optimizers, "_GPU", "none")
        trainer_of(world, tmp_path, [Stop(3)]).fit(TRAIN)
    world.close()
    world = World(None)
    trainer_of(world, tmp_path).fit(TRAIN, resume=True)
    expected = World(None)
    trainer_of(expected).fit(TRAIN)
    assert world.optimizer.param_groups[0]["fused"] is True
    assert torch.allclose(weights_of(world), weights_of(expected), atol=1e-6)
    assert float(world.optimizer.state_dict()["state"][0]["step"]) == 6
    world.close()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_fused_optimizer_on_a_gpu_is_captured_with_the_same_bits(kind: str) -> None:
    if not dense_optimizers._fused_on_gpu(type(KINDS[kind]([torch.nn.Parameter(torch.ones(1))]))):
        pytest.skip("this version of torch has no fused kernel of it for GPUs")
    results = []
    for graphed in (False, True):
        torch.manual_seed(0)
        net = torch.nn.Linear(8, 8, device="cuda")
        optimizer = KINDS[kind](net.parameters())
        optimizer.param_groups[0]["initial_lr"] = optimizer.param_groups[0]["lr"]
        dense_optimizers.use_fused([optimizer])
        assert optimizer.param_groups[0]["fused"] is True
        x = torch.randn(4, 8, device="cuda")

        def step(net: Any = net, optimizer: Any = optimizer, x: Any = x) -> None:
            net(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())  # parameters, rates and x are filled there
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        replay: Any = step
        if graphed:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            replay = graph.replay
        for n in range(5):
            dense_optimizers.set_rate(optimizer.param_groups[0], 0.01 / (n + 1))
            replay()
        state = dense_state_dict(net)
        results.append({name: value.cpu().numpy().tobytes() for name, value in state.items()})
    assert differing(*results) == []
