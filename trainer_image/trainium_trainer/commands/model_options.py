"""Options of the commands that ask a model, `generate` and `evaluate`, and the models and settings that they name.

Guarantees:
- Importing this module imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainium_contract.accelerators import Device
from trainium_contract.trainer.evaluate import GenerationConfig
from trainium_trainer.evaluate.answering.folder import ComputeType, ModelLocations
from trainium_trainer.exits import UserError
from trainium_trainer.validation_errors import validate

if TYPE_CHECKING:
    from trainium_contract.trainer.config import TrainingConfig
    from trainium_trainer.evaluate.answering.endpoint import Endpoint

Adapter = Annotated[
    str | None, typer.Option(help="Folder of an adapter in peft's format, put beside --base without merging.")
]
DeviceOption = Annotated[Device | None, typer.Option(help="Omitted: a GPU if there is one, else the CPU.")]
PrecisionOption = Annotated[ComputeType, typer.Option(help="Auto: float32 on a CPU, the folder's own type on a GPU.")]
EndpointAddress = Annotated[
    str | None,
    typer.Option(help="Ask a server with OpenAI's protocol: http://HOST:8000/v1; key: OPENAI_API_KEY."),
]
EndpointModel = Annotated[str | None, typer.Option(help="Name of the model there; omitted: the only one.")]
EndpointSeconds = Annotated[float, typer.Option(min=1, max=86_400, help="Longest time of an answer of the endpoint.")]
MaxNewTokens = Annotated[int | None, typer.Option(help="Most tokens of an answer; 128.", show_default=False)]
Stop = Annotated[list[str] | None, typer.Option(help="A text that ends an answer; may be repeated.")]
BatchSize = Annotated[int | None, typer.Option(help="Prompts that are answered at once; 8.", show_default=False)]


def open_server(url: str | None, model: str | None, seconds: float, *folders: str | None) -> Endpoint | None:
    """Return the endpoint; None if folders are given. Raises UserError, also if both are given."""
    if url is None:
        return None
    if any(folders):
        raise UserError("--endpoint asks a server: leave out --base, --adapter and MODEL, which tasks alone may need")
    from trainium_trainer.evaluate.answering.endpoint import open_endpoint  # noqa: PLC0415 - torch

    return open_endpoint(url, model, seconds)


def pick_models(model: str | None, base: str | None, adapter: str | None, *, compared: bool = False) -> ModelLocations:
    """Return the model, or the adapter with its base; `compared`: the base is evaluated too."""
    if adapter is not None:
        if base is None or model is not None:
            raise UserError("--adapter goes with --base, the model it was made for, and with no other MODEL")
        return ModelLocations(model=base, adapter=adapter, base=base if compared else None)
    if model is None:
        raise UserError("give a MODEL folder, or --base and --adapter")
    if base is not None and not compared:
        raise UserError("--base goes with --adapter: leave it out, or give the adapter")
    return ModelLocations(model=model, base=base)


def merge_generation(training: TrainingConfig | None, **options: Any) -> GenerationConfig:
    """Return the settings of the configuration, overridden by options. Raises UserError."""
    wire = training.evaluate.generation.to_wire() if training is not None else {}
    return validate(GenerationConfig, wire | {name: value for name, value in options.items() if value is not None})
