"""One served model at an ingress: what its calls need, and no other model's.

service.py has one or several of them, and picks by the name that a call has.
"""

from __future__ import annotations

from penstock.deployments.ingress.core.answers.tool_forms.table import ToolSupport, support_of
from penstock.deployments.ingress.core.backend import Learner, TokenBackend
from penstock.deployments.ingress.core.call import LoraNames, ServedModel
from penstock.deployments.ingress.core.preparation import Preparation, PreparationSettings
from penstock.deployments.ingress.core.request_metrics import RequestMetrics
from penstock.deployments.ingress.core.text_pool import TextPool
from penstock.workers.config import EngineConfig
from penstock.workers.context_policy import ContextSettings
from penstock.workers.sampling_defaults import SamplingDefaults
from penstock.workers.text.pair_template import PairTemplate
from penstock.workers.text.reasoning import Marks
from penstock.workers.text.tokenizer import Tokenizer
from penstock.workers.text.tool_forms import AUTO


class ModelRuntime:
    """A model's tokenizer, its workers, and how its calls become requests."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        backend: TokenBackend,
        *,
        model_name: str,
        other_names: tuple[str, ...] = (),
        vocab_size: int,
        max_model_len: int,
        marks: Marks | None = None,
        tools: ToolSupport | None = None,
        contexts: ContextSettings | None = None,
        learner: Learner | None = None,
        seed: int = 0,
        longest_wait_s: float | None = None,
        shares_prefixes: bool = False,
        sampling_defaults: SamplingDefaults | None = None,
        pairs: PairTemplate | None = None,
        adapters: LoraNames | None = None,
    ):
        """`other_names`: of the model, as in ServedModel.
        `learner`: receives the length of each answer; without one, requests carry no features.
        `vocab_size`: the model's; its tokenizer may know fewer tokens. `marks`: of reasoning.
        `tools`: how the model is given tools; None: as its chat template says.
        `contexts`: which context policies requests may choose; None: a worker's defaults.
        `seed`: of the seeds of requests that bring none. `longest_wait_s`: until a worker computes
        a request, in seconds; None: a request may wait until its own deadline. `shares_prefixes`:
        tenants share cached prompts. `sampling_defaults`: the model's own; None: it has none.
        `pairs`: how a reranker reads them; None: the model is none.
        `adapters`: its LoRA adapters; None: it has none."""
        self.tokenizer = tokenizer
        self.backend = backend
        self.learner = learner
        self.tools = support_of(AUTO, tokenizer) if tools is None else tools
        self.served = ServedModel(
            model_name,
            vocab_size,
            max_model_len,
            tokenizer.has_chat_template,
            sampling_defaults or SamplingDefaults(),
            other_names=other_names,
            tool_call_parser=self.tools.name,
            scores_pairs=pairs is not None,
            adapters=adapters or LoraNames(),
        )
        self.metrics = RequestMetrics(model_name, max_model_len)
        self.was_ready = False  # its workers have taken requests, at some time
        contexts = contexts or ContextSettings.of(EngineConfig(), max_model_len)
        self._how = PreparationSettings(
            contexts, marks, self.tools, longest_wait_s, shares_prefixes, pairs
        )
        self._seed = seed

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """With these the front ends make the parameters of a call."""
        return self.served.sampling_defaults

    @property
    def tool_note(self) -> str:
        """What an operator should know of tool calls; empty: nothing."""
        note = self.tools.note
        return note if self.tools.form else f"WARNING: {note}"

    def preparation(self, texts: TextPool) -> Preparation:
        """What makes requests of its calls. `texts`: of the ingress, which all models share."""
        return Preparation(self.served, self.tokenizer, texts, self._how, seed=self._seed)

    def ready(self) -> bool:
        """Whether a request would be served now."""
        is_ready = self.backend.ready()
        self.was_ready = self.was_ready or is_ready
        return is_ready
