"""The adapter's optimizer: AdamW, its learning-rate schedule, gradient clipping, and how its state is stored.

Only adapter matrices are trained (fp32 masters), so weight decay applies to every parameter; it is decoupled
(Loshchilov & Hutter, arXiv 1711.05101). Two states to choose from:

* `adamw_8bit`: bitsandbytes' block-wise 8-bit states (arXiv 2110.02861), 2 bytes a parameter. It runs on CUDA and
  on the CPU. bitsandbytes keeps fp32 states for tensors of fewer than 4096 elements.
* `adamw`: torch's AdamW with fp32 states, 8 bytes a parameter.

The schedule is a pure function of the step, so a resumed run needs no scheduler state. The optimizer's state is
flattened to named tensors (`NAME/exp_avg`, `NAME/state1`, ...) that safetensors can store without pickle, plus a few
JSON numbers; loading them gives the same bits back.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from qerl.config import TrainConfig
from qerl.errors import UserError

EPS = 1e-8
_QMAPS = {"qmap1": "dynamic", "qmap2": "udynamic"}
"""bitsandbytes' two code books: key in a parameter's state -> key in `optimizer.name2qmap`; all parameters share them."""


def make_optimizer(params: Sequence[tuple[str, Parameter]], config: TrainConfig) -> Optimizer:
    """AdamW over the adapter's parameters, in the given order, in one group. Raises ValueError if there are none."""
    if not params:
        raise ValueError("no trainable parameters: the adapter touched nothing")
    settings: dict[str, Any] = {
        "lr": config.learning_rate,
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": EPS,
        "weight_decay": config.weight_decay,
    }
    tensors = [parameter for _, parameter in params]
    if config.optim == "adamw":
        return torch.optim.AdamW(tensors, **settings)
    try:
        from bitsandbytes.optim.adamw import AdamW8bit
    except ImportError as error:
        raise UserError(
            "optim=adamw_8bit needs bitsandbytes: pip install bitsandbytes, or use --optim adamw"
        ) from error
    return AdamW8bit(tensors, **settings)


def learning_rate_at(step: int, num_steps: int, config: TrainConfig) -> float:
    """Learning rate of the update that follows `step` finished updates (0 <= step < num_steps).

    Linear warm-up over round(warmup_ratio * num_steps) updates, then cosine to 0, linear to 0, or constant: the
    numbers of transformers' `get_*_schedule_with_warmup`, whose first update under a warm-up has learning rate 0.
    """
    num_warmup_steps = round(config.warmup_ratio * num_steps)
    if step < num_warmup_steps:
        return config.learning_rate * step / num_warmup_steps
    progress = (step - num_warmup_steps) / max(1, num_steps - num_warmup_steps)
    match config.lr_scheduler_type:
        case "constant":
            scale = 1.0
        case "linear":
            scale = max(0.0, 1.0 - progress)
        case "cosine":
            scale = max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))
    return config.learning_rate * scale


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> None:
    """Use `learning_rate` for the next update."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def clip_gradients(params: Iterable[Parameter], max_norm: float) -> float:
    """Scale gradients down to the global fp32 norm `max_norm`; return the norm they had before.

    Parameters without a gradient are skipped (norm 0 if none has one). A norm that is not finite is returned and the
    gradients stay as they are: what to do then is the caller's decision.
    """
    pairs = [(parameter, parameter.grad) for parameter in params if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm([gradient.float() for _, gradient in pairs])
    if bool(torch.isfinite(norm)):
        torch.nn.utils.clip_grads_with_norm_([parameter for parameter, _ in pairs], max_norm, norm)
    return norm.item()


def optimizer_tensors(
    optimizer: Optimizer, names: Sequence[str]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The optimizer's state as named CPU tensors and JSON values; `names` follow the order of its parameters.

    A parameter that was never updated has no state and no entry.
    """
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for name, parameter in _named(optimizer, names):
        for key, value in optimizer.state.get(parameter, {}).items():
            if key in _QMAPS:
                tensors[key] = value.cpu()
            elif isinstance(value, Tensor):
                tensors[f"{name}/{key}"] = value.detach().to("cpu", copy=True).contiguous()
            else:
                numbers.setdefault(name, {})[key] = value
    return tensors, {"optimizer": type(optimizer).__name__, "numbers": numbers}


def load_optimizer_tensors(
    optimizer: Optimizer, names: Sequence[str], tensors: dict[str, Tensor], state: dict[str, Any]
) -> None:
    """Put back what `optimizer_tensors` returned, bit for bit.

    Raises ValueError if it belongs to another kind of optimizer, or names or shapes do not match the parameters.
    """
    kind = type(optimizer).__name__
    if state["optimizer"] != kind:
        raise ValueError(f"the stored state is {state['optimizer']}'s, the optimizer is {kind}")
    parameters = dict(_named(optimizer, names))
    restored: dict[str, dict[str, Any]] = {name: dict(n) for name, n in state["numbers"].items()}
    for full_name, value in tensors.items():
        if full_name not in _QMAPS:
            name, _, key = full_name.rpartition("/")
            restored.setdefault(name, {})[key] = value
    if unknown := restored.keys() - parameters.keys():
        raise ValueError(
            f"the stored optimizer state has parameters unknown here: {sorted(unknown)}"
        )
    for name, values in restored.items():
        optimizer.state[parameters[name]] = _on_device(name, values, parameters[name])
    _restore_code_books(optimizer, [parameters[name] for name in restored], tensors)


def _named(optimizer: Optimizer, names: Sequence[str]) -> list[tuple[str, Parameter]]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if len(set(names)) != len(parameters):
        raise ValueError(f"{len(set(names))} distinct names for {len(parameters)} parameters")
    return list(zip(names, parameters, strict=True))


def _on_device(name: str, values: dict[str, Any], parameter: Parameter) -> dict[str, Any]:
    """Copies of a parameter's state; torch's step counter stays on the CPU, where torch makes it."""
    moments = [key for key in ("exp_avg", "exp_avg_sq", "state1", "state2") if key in values]
    for key in moments:
        if values[key].shape != parameter.shape:
            raise ValueError(
                f"the stored {name}/{key} is {tuple(values[key].shape)}, not {tuple(parameter.shape)}"
            )
    if len(moments) != 2:
        raise ValueError(f"the stored state of {name} is not whole: it has only {sorted(values)}")
    return {
        key: value.to("cpu" if key == "step" else parameter.device, copy=True)
        if isinstance(value, Tensor)
        else value
        for key, value in values.items()
    }


def _restore_code_books(
    optimizer: Optimizer, parameters: Sequence[Parameter], tensors: dict[str, Tensor]
) -> None:
    if not _QMAPS.keys() & tensors.keys():
        return
    from bitsandbytes.optim.adamw import AdamW8bit

    assert isinstance(optimizer, AdamW8bit)
    for key in _QMAPS.keys() & tensors.keys():
        code_book = tensors[key].to(parameters[0].device, copy=True)
        optimizer.name2qmap[_QMAPS[key]] = code_book
        for parameter in parameters:
            if optimizer.state[parameter]["state1"].dtype == torch.uint8:
                optimizer.state[parameter][key] = code_book
