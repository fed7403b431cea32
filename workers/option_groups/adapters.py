"""The settings of LoRA adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from penstock.workers.errors import ConfigError
from penstock.workers.option_groups.adapter_names import parse_modules
from penstock.workers.settings import option


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """LoRA adapters of the model."""

    GROUP: ClassVar[str] = "LoRA adapters"

    enable_lora: bool = option(
        False, "serve LoRA adapters of the model, as peft saves them (docs/guide/adapters.md)"
    )
    lora_modules: str | tuple[str, ...] | None = option(
        None,
        "adapters that are loaded at the start, as NAME=FOLDER: requests name them as their model; "
        "the folders must be on each machine; none: none",
        is_list=True,
    )
    max_loras: int = option(8, "maximum adapters that a worker holds at a time", min=1)
    max_lora_rank: int = option(
        64,
        "maximum rank of an adapter; with max_loras, it decides what memory is kept for them",
        min=1,
    )

    lora_runtime_updates: bool = option(
        False,
        "let clients load and drop adapters while the server runs, which read folders of its "
        "machines: POST /v1/load_lora_adapter and /v1/unload_lora_adapter, with API keys for the "
        "role admin",
    )

    @property
    def adapter_folders(self) -> dict[str, str]:
        """The folders of `lora_modules`, by name. Raises ConfigError."""
        texts = self.lora_modules or ()
        return parse_modules((texts,) if isinstance(texts, str) else texts)

    def check_adapters(self) -> None:
        """Raise ConfigError for adapters that cannot be loaded together, or are not wanted."""
        folders = self.adapter_folders
        for name in ("lora_modules", "lora_runtime_updates"):
            if getattr(self, name) and not self.enable_lora:
                raise ConfigError(f"{name} needs enable_lora: set it, or leave {name} out")
        if len(folders) > self.max_loras:
            raise ConfigError(
                f"lora_modules has {len(folders)} adapters, and max_loras is {self.max_loras}: "
                "raise max_loras, or leave some out"
            )
