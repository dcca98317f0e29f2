"""What every section of the configuration is made of. Imports no torch."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


def aliases(**names: str) -> BeforeValidator:
    """Accept other names of a choice; `True` and `False` are looked up as "true" and "false"."""

    def replace(value: Any) -> Any:
        return names.get(str(value).lower(), value) if isinstance(value, str | bool) else value

    return BeforeValidator(replace)


class Section(BaseModel):
    """A group of settings; unknown keys are errors, values cannot change after parsing."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )
