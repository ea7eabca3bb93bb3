"""What may stand in a request body. Types are strict (no "5" for 5, no true for 1, no 5.0 for an integer; DESIGN A10).

`messages` and the `cache` field are taken as they came: their grammar is the business of `akv_jax.chat`. Top-level
fields that are not listed here are accepted and come out in `model_extra`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from akv_jax.chat.messages import describe
from akv_jax.errors import RequestError, invalid
from akv_jax.request import Sampling
from serving.errors import validation_error
from spec.operations import Append, Drop, Operation, Reposition

INT64_MAX = 2**63 - 1
#: `cache` and the authors' own names for it; see `akv_jax.chat.cache_field`.
CACHE_FIELDS = ("cache", "drop_message", "reposition", "drop_rule")
MAX_STOP_STRINGS = 256
#: Characters. Every one costs time with every character that comes out.
MAX_STOP_LENGTH = 1024
MAX_TOP_LOGPROBS = 20


def _huge_integer(value: Any) -> Any:
    """The JSON parser gives integers beyond 64 bits as floats; more than anything fits means all that fits."""
    return INT64_MAX if isinstance(value, float) and value > INT64_MAX else value


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _token_key(key: str) -> str:
    if not (key.isascii() and key.isdigit() and (key == "0" or key[0] != "0") and len(key) < 20):
        raise ValueError('a token id such as "42" as the key')
    return key


Integer = Annotated[int, Field(strict=True)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True)]
TokenId = Annotated[int, Field(strict=True, ge=0)]
TokenKey = Annotated[str, Field(strict=True), AfterValidator(_token_key)]
TokenCount = Annotated[int, BeforeValidator(_huge_integer), Field(strict=True, ge=1)]


class Body(BaseModel):
    """A null top-level field is an absent one, as OpenAI's clients mean it."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


class SamplingBody(Body):
    """The fields that every generating route shares."""

    model: Text | None = None
    max_tokens: TokenCount | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[Number, Field(gt=0, le=1)] = 1.0
    #: -1 and 0 keep every token.
    top_k: Annotated[Integer, Field(ge=-1)] = 0
    min_p: Annotated[Number, Field(ge=0, le=1)] = 0.0
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[Number, Field(gt=0, le=10)] = 1.0
    logit_bias: dict[TokenKey, Annotated[Number, Field(ge=-100, le=100)]] = {}
    seed: Annotated[Integer, Field(ge=-INT64_MAX - 1, le=INT64_MAX)] | None = None
    stop: Annotated[
        list[Annotated[Text, Field(min_length=1, max_length=MAX_STOP_LENGTH)]],
        BeforeValidator(_one_or_many),
        Field(max_length=MAX_STOP_STRINGS),
    ] = []
    stop_token_ids: list[TokenId] = []
    ignore_eos: Flag = False
    top_logprobs: Annotated[Integer, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    n: Integer = 1
    cache_salt: Text = ""

    @field_validator("n")
    @classmethod
    def _one_choice(cls, value: int) -> int:
        if value != 1:
            raise ValueError("1, the only number of choices that is supported")
        return value

    def sampling(self, vocab_size: int) -> Sampling:
        """As the engine takes it. Token ids must be in the vocabulary."""
        logit_bias = {int(key): value for key, value in self.logit_bias.items()}
        for token_id in logit_bias:
            if token_id >= vocab_size:
                raise _not_in_vocabulary(token_id, vocab_size, f"logit_bias.{token_id}")
        for index, token_id in enumerate(self.stop_token_ids):
            if token_id >= vocab_size:
                raise _not_in_vocabulary(token_id, vocab_size, f"stop_token_ids[{index}]")
        return Sampling(
            max_tokens=self.token_limit(),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=logit_bias,
            seed=self.seed,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            logprobs=self.wants_logprobs(),
            top_logprobs=self.alternatives(),
        )

    def alternatives(self) -> int:
        return self.top_logprobs or 0

    def token_limit(self) -> int | None:
        return self.max_tokens

    def wants_logprobs(self) -> bool:
        return self.top_logprobs is not None


class PromptBody(Body):
    """The fields that say what a chat's prompt is."""

    messages: Any = None
    tools: Any = None
    add_generation_prompt: Flag | None = None
    continue_final_message: Flag = False
    cache: Any = None
    drop_message: Any = None
    reposition: Any = None
    drop_rule: Any = None


class StreamOptions(Body):
    include_usage: Flag = False


class JsonSchema(Body):
    name: Text = ""
    definition: dict[str, Any] = Field(alias="schema")
    #: Whether keywords that the grammar engine lacks are an error. Else they are left unchecked.
    strict: Flag = False


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise invalid("this field is required with type json_schema", "response_format.json_schema")
        return self


class ChatBody(SamplingBody, PromptBody):
    """`POST /v1/chat/completions` (DESIGN A1, A2)."""

    messages: Any = Field()
    max_completion_tokens: TokenCount | None = None
    stream: Flag = False
    stream_options: StreamOptions = StreamOptions()
    logprobs: Flag = False
    tool_choice: Any = None
    parallel_tool_calls: Flag = True
    response_format: ResponseFormat = ResponseFormat()
    return_token_ids: Flag = False

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise invalid("needs logprobs: true beside it", "top_logprobs")
        return self

    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def wants_logprobs(self) -> bool:
        return self.logprobs


class CompletionBody(SamplingBody):
    """`POST /v1/completions` (DESIGN A8). `logprobs` is the number of alternatives, and so turns them on."""

    prompt: Any = Field()
    max_tokens: TokenCount | None = 16
    logprobs: Annotated[Integer, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    stream: Flag = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: Flag = False
    echo: Flag = False
    suffix: Text = ""
    best_of: Integer = 1
    cache: Any = None
    drop_message: Any = None
    reposition: Any = None
    drop_rule: Any = None

    @model_validator(mode="after")
    def _refuse_what_is_not_there(self) -> CompletionBody:
        if self.echo:
            raise invalid("the prompt is not echoed here: expected false or nothing", "echo")
        if self.suffix:
            raise invalid("text is continued, not filled in: expected no suffix", "suffix")
        if self.best_of != 1:
            raise invalid("one answer is all that is computed: expected 1 or nothing", "best_of")
        refuse_cache(self)
        return self

    def alternatives(self) -> int:
        return self.logprobs or 0

    def wants_logprobs(self) -> bool:
        return self.logprobs is not None


class SequenceBody(SamplingBody):
    """`POST /v1/sequence` (DESIGN A9)."""

    operations: Any
    return_logits: Flag = False
    logprobs: Flag = False

    def wants_logprobs(self) -> bool:
        return self.logprobs or self.top_logprobs is not None


class TokenizeBody(PromptBody):
    """`POST /tokenize`: exactly one of `prompt` and `messages`. A `cache` field is checked, beside `messages` alone."""

    prompt: Text | None = None


class DetokenizeBody(Body):
    #: Checked by `check_token_ids`, which can be interrupted where there are millions.
    tokens: Any = Field()


def refuse_cache(body: CompletionBody | TokenizeBody) -> None:
    """For a plain text: nothing is silently ignored (A3)."""
    for name in CACHE_FIELDS:
        if getattr(body, name) is not None:
            raise invalid("a prompt has no messages to name: use /v1/chat/completions or /v1/sequence", name)


AnyBody = TypeVar("AnyBody", bound=Body)


def validate(schema: type[AnyBody], data: dict[str, Any]) -> AnyBody:
    """`data` as `schema`, or a RequestError that names the first bad field down to its element."""
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        raise validation_error(error) from None


def check_token_ids(ids: Any, vocab_size: int, param: str) -> tuple[int, ...]:
    """`ids` as a tuple of ids of this vocabulary; `param` is the path of the list."""
    if not isinstance(ids, list):
        raise invalid(f"expected a list of token ids, found {describe(ids)}", param)
    for index, token_id in enumerate(ids):
        if type(token_id) is not int:
            raise invalid(f"expected a token id, found {describe(token_id)}", f"{param}[{index}]")
        if not 0 <= token_id < vocab_size:
            raise _not_in_vocabulary(token_id, vocab_size, f"{param}[{index}]")
    return tuple(ids)


def parse_operations(raw: Any, vocab_size: int) -> tuple[Operation, ...]:
    """The history of a sequence request (A9). A dropped index must have been appended by then (L2).

    What plainly does nothing is left out (L5): a body may hold any number of such operations, and the engine's thread
    is to be spared them.
    """
    if not isinstance(raw, list):
        raise invalid(f"expected a list of operations, found {describe(raw)}", "operations")
    operations: list[Operation] = []
    dropped: set[int] = set()
    length = 0
    for index, item in enumerate(raw):
        param = f"operations[{index}]"
        match item:
            case ["append", ids]:
                tokens = check_token_ids(ids, vocab_size, f"{param}[1]")
                length += len(tokens)
                if tokens:
                    operations.append(Append(tokens))
            case ["drop", indices]:
                new = _parse_indices(indices, length, f"{param}[1]") - dropped
                if new:
                    operations.append(Drop(new))
                    dropped |= new
            case ["reposition"]:
                if operations and not isinstance(operations[-1], Reposition):
                    operations.append(Reposition())
            case _:
                raise invalid('expected ["append", [ids]], ["drop", [indices]] or ["reposition"]', param)
    if not length:
        raise invalid("expected at least one token to be appended", "operations")
    return tuple(operations)


def _parse_indices(raw: Any, length: int, param: str) -> frozenset[int]:
    if not isinstance(raw, list):
        raise invalid(f"expected a list of logical indices, found {describe(raw)}", param)
    for at, index in enumerate(raw):
        if type(index) is not int or not 0 <= index < length:
            expected = f"the logical index of one of the {length} tokens appended so far"
            raise invalid(f"expected {expected}, found {describe(index)}", f"{param}[{at}]")
    return frozenset(raw)


def _not_in_vocabulary(token_id: int, vocab_size: int, param: str) -> RequestError:
    return invalid(f"expected a token id from 0 to {vocab_size - 1}, found {describe(token_id)}", param)
