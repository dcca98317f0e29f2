"""The policy: a transformers decoder over the packed base, with a PEFT LoRA adapter as its only trained part.

Built on the meta device, so that no dense weight ever exists: linears become views of the fused packed matrices, norms
take the base's fp32 weights, embeddings and head ARE the base's tensors. transformers keeps the architecture, PEFT the
adapter's masters and file format, we the arithmetic in between.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import cast

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model, set_peft_model_state_dict
from peft.utils import load_peft_weights
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from qerl.algo.noise import noisy_weight
from qerl.config import LoraConfig
from qerl.errors import UserError
from qerl.kernels import expand
from qerl.model.attention import layout_for, register
from qerl.model.blocks import GatedMlp, SelfAttention
from qerl.model.frozen_linear import FrozenLinear, FrozenMatrix, LoraLinear
from qerl.model.logprobs import chunked_logprobs
from qerl.model.norm import RMSNorm
from qerl.model.offload import HostStore
from qerl.model.recompute import recomputed
from qerl.quant.base_weights import BaseWeights
from qerl.seeding import derive_seed
from qerl.types import Microbatch, NoiseDraw

ADAPTER = "default"


def build_decoder(
    base: BaseWeights, model_name: str
) -> tuple[PreTrainedModel, tuple[FrozenMatrix, ...]]:
    """transformers' causal model over the base's tensors: frozen linears, fp32 norms, shared embeddings and head.

    Also returns the matrices that its products are made with. Raises ValueError if a parameter or buffer is left on the meta device.
    """
    config = copy.deepcopy(base.config)
    config.name_or_path = model_name
    embedding = nn.Parameter(base.tensors["model.embed_tokens.weight"], requires_grad=False)
    device, dtype = embedding.device, embedding.dtype
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=register()
        )
    for name, module in list(model.named_modules()):
        parent, _, leaf = name.rpartition(".")
        owner = model.get_submodule(parent)
        if isinstance(module, nn.Linear) and name != "lm_head":
            setattr(owner, leaf, FrozenLinear(base.packed(name), base.tensors.get(f"{name}.bias")))
        elif hasattr(module, "variance_epsilon"):
            eps = cast(float, module.variance_epsilon)
            setattr(owner, leaf, RMSNorm(base.tensors[f"{name}.weight"], eps))
    matrices = []
    for index, layer in enumerate(model.model.layers):
        qkv = _fused(base, f"model.layers.{index}.self_attn.q_proj")
        gate_up = _fused(base, f"model.layers.{index}.mlp.gate_proj")
        matrices += [qkv, layer.self_attn.o_proj.matrix, gate_up, layer.mlp.down_proj.matrix]
        layer.self_attn = SelfAttention(layer.self_attn, qkv)
        layer.mlp = GatedMlp(layer.mlp, gate_up)
    model.model.embed_tokens.weight = embedding
    head = base.tensors.get("lm_head.weight")
    model.lm_head.weight = embedding if head is None else nn.Parameter(head, requires_grad=False)
    # A module built on meta has no rotary tables; they are not weights, so they are computed again.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(device)
    left = [n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
    if left:
        raise ValueError(f"left on the meta device: {', '.join(left)}")
    return model, tuple(matrices)


def _fused(base: BaseWeights, member: str) -> FrozenMatrix:
    """The fused matrix that a linear's rows are in, with the biases of all its members."""
    fused, _, _ = base.layout.locate(member)
    biases = [base.tensors.get(f"{name}.bias") for name in fused.members]
    found = [bias for bias in biases if bias is not None]
    if found and len(found) < len(biases):
        raise ValueError(f"{fused.name}: some of its members have a bias and some have none")
    return FrozenMatrix(base.linears[fused.name], torch.cat(found) if found else None)


def _peft_config(config: LoraConfig, model_name: str) -> PeftLoraConfig:
    targets, alpha = config.lora_target_modules, config.lora_alpha
    peft_config = PeftLoraConfig(
        r=config.lora_r,
        lora_alpha=int(alpha) if alpha == int(alpha) else alpha,  # pyright: ignore[reportArgumentType]
        use_rslora=config.use_rslora,
        target_modules="all-linear" if targets == ("all-linear",) else list(targets),
        base_model_name_or_path=model_name,
        task_type="CAUSAL_LM",
    )
    peft_config._register_custom_module({FrozenLinear: LoraLinear})
    return peft_config


def check_adapter(folder: Path, lora: LoraConfig) -> None:
    """Raise UserError unless `folder` holds a PEFT LoRA adapter of this rank and scale; its weights are not read."""
    if not (folder / "adapter_config.json").is_file():  # PEFT would ask the hub
        raise UserError(
            f"{folder}: no adapter there (no adapter_config.json); a run's is RUN/adapter"
        )
    if not (folder / "adapter_model.safetensors").is_file():  # PEFT would unpickle a .bin
        raise UserError(
            f"{folder}: no adapter_model.safetensors; pickled adapters are not read, save it as safetensors"
        )
    try:
        saved = PeftLoraConfig.from_pretrained(str(folder))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(f"{folder}: not a PEFT LoRA adapter ({error})") from error
    wanted = {"r": lora.lora_r, "lora_alpha": lora.lora_alpha, "use_rslora": lora.use_rslora}
    for field, value in wanted.items():
        there = vars(saved)[field]
        if there != value:
            raise UserError(
                f"{folder}: its {field} is {there}, the run's is {value}; make them equal"
            )


class Policy:
    """The model that is trained. State: the adapter's parameters; everything else is the base's."""

    def __init__(
        self,
        base: BaseWeights,
        lora: LoraConfig,
        *,
        model_name: str,
        seed: int,
        keep_initial: bool = False,
    ):
        """`keep_initial` keeps a copy of `init_adapter`, which `reference` needs."""
        self.base, self.lora = base, lora
        self.causal_model, self.matrices = build_decoder(base, model_name)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed("adapter", seed))
            try:
                self.peft_model: PeftModel = get_peft_model(
                    self.causal_model, _peft_config(lora, model_name)
                )
            except ValueError as error:
                raise UserError(
                    f"lora_target_modules={','.join(lora.lora_target_modules)}: {error}"
                ) from error
        # transformers recomputes layers, and drops caches, in training mode only; nothing else depends on the mode.
        self.peft_model.eval()
        self.recomputes = False
        self.host_store: HostStore | None = None
        self.decoder = cast(nn.Module, self.causal_model.model)
        self.head = cast(nn.Linear, self.causal_model.lm_head).weight
        self.device, self.dtype = self.head.device, self.head.dtype
        self.noise_modules = self._find_noise_modules()
        self._trainable = sorted(
            (n, p) for n, p in self.peft_model.named_parameters() if p.requires_grad
        )
        if not self._trainable:
            raise ValueError("the adapter has no trainable parameter")
        self._initial: list[Tensor] | None = None
        if lora.init_adapter is not None:
            self.load_adapter(Path(lora.init_adapter))
            if keep_initial:
                self._initial = [p.detach().clone() for _, p in self._trainable]

    def _find_noise_modules(self) -> dict[str, RMSNorm]:
        names = [
            f"model.layers.{layer}.{norm}"
            for layer in range(self.base.config.num_hidden_layers)
            for norm in self.base.family.noise_norms
        ]
        return {name: cast(RMSNorm, self.causal_model.get_submodule(name)) for name in names}

    def trainable_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Adapter matrices by name, fp32, in a fixed order."""
        return self._trainable

    def logprobs(self, batch: Microbatch, temperature: float) -> tuple[Tensor, Tensor]:
        """[C] log-probabilities of the scored tokens, differentiable in the adapter, and [C] entropies."""
        layout = layout_for(batch.rows, self.device, self.dtype)
        self.decoder.train(self.recomputes and torch.is_grad_enabled())
        if self.host_store is not None:
            self.host_store.start()
        hidden = self.decoder(
            input_ids=batch.token_ids[None],
            position_ids=batch.position_ids[None],
            use_cache=False,
            layout=layout,
        ).last_hidden_state[0]
        self.decoder.eval()
        return chunked_logprobs(hidden[batch.score_index], self.head, batch.target_ids, temperature)

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Inside the context the policy is the one that training started from; afterwards it is as it was.

        Without `init_adapter` that is the base, its adapter switched off; with it, the adapter as it was loaded, which
        takes `keep_initial`. Raises ValueError without that.
        """
        if self.lora.init_adapter is None:
            with self.peft_model.disable_adapter():
                yield
            return
        if self._initial is None:
            raise ValueError("the initial adapter was not kept: build the policy with keep_initial")
        trained = [p.detach().clone() for _, p in self._trainable]
        try:
            self._copy_in(self._initial)
            yield
        finally:
            self._copy_in(trained)

    @torch.no_grad()
    def _copy_in(self, values: Sequence[Tensor]) -> None:
        for (_, parameter), value in zip(self._trainable, values, strict=True):
            parameter.copy_(value)

    def enable_recomputation(self, num_layers: int | None = None, num_offloaded: int = 0) -> None:
        """Of the first `num_layers` layers (default: all) keep only the input in forward and recompute the rest in backward.

        The inputs of the first `num_offloaded` of them wait in the host's memory.
        """
        self.recomputes = True
        self.host_store = HostStore(self.device) if num_offloaded else None
        for index, layer in enumerate(self.decoder.layers):  # pyright: ignore[reportArgumentType]
            # transformers calls the function with a layer's forward and the hidden states.
            layer.gradient_checkpointing = num_layers is None or index < num_layers
            layer._gradient_checkpointing_func = partial(
                recomputed,
                parameters=[p for p in layer.parameters() if p.requires_grad],
                store=self.host_store if index < num_offloaded else None,
            )

    @contextmanager
    def noise(self, draw: NoiseDraw | None) -> Iterator[None]:
        """Noise on the block norms inside the context; the clean weights come back bit for bit."""
        if draw is None:
            yield
            return
        clean = {
            name: module.weight.detach().clone() for name, module in self.noise_modules.items()
        }
        try:
            for name, module in self.noise_modules.items():
                module.weight.data.copy_(noisy_weight(clean[name], draw, name))
            yield
        finally:
            for name, module in self.noise_modules.items():
                module.weight.data.copy_(clean[name])

    @contextmanager
    def expanded(self) -> Iterator[None]:
        """Hold every matrix expanded, for phases that use it many times; inference only."""
        try:
            for matrix in self.matrices:
                matrix.expanded = expand(matrix.packed, self.dtype)
            yield
        finally:
            for matrix in self.matrices:
                matrix.expanded = None

    def save_adapter(self, folder: Path) -> None:
        """Write adapter_model.safetensors and adapter_config.json, loadable by PeftModel.from_pretrained."""
        self.peft_model.save_pretrained(str(folder), save_embedding_layers=False)
        (folder / "README.md").unlink(missing_ok=True)

    def load_adapter(self, folder: Path) -> None:
        """Copy a saved adapter into this one. Raises UserError when shapes, rank or targets differ."""
        check_adapter(folder, self.lora)
        try:
            weights = load_peft_weights(str(folder), device="cpu")
        except (OSError, ValueError, SafetensorError) as error:
            raise UserError(f"{folder}: the adapter's weights cannot be read ({error})") from error
        try:
            outcome = set_peft_model_state_dict(self.peft_model, weights, adapter_name=ADAPTER)
        except RuntimeError as error:
            first, *others = [line.strip() for line in str(error).splitlines()[1:]] or [str(error)]
            more = f" (and {len(others)} more)" if others else ""
            raise UserError(
                f"{folder}: its matrices do not fit this model: {first}{more}"
            ) from error
        missing = [key for key in outcome.missing_keys if "lora_" in key]
        if missing or outcome.unexpected_keys:
            unexpected = list(outcome.unexpected_keys)
            raise UserError(
                f"{folder}: other target modules: missing {missing[:2]}, unexpected {unexpected[:2]}"
            )
