"""What is asked: a server with an OpenAI API. With the standard library only."""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sparda_jax.eval.prompting import Prompt, Prompter
from sparda_jax.eval.subjects import Answer

# So many seconds a server may say nothing: a queue of long prompts is no failure, a machine that has gone away is one.
PATIENCE_SECONDS = 1800.0


class EndpointError(Exception):
    """The server can't be asked; the message says why."""


class Endpoint:
    """A server with an OpenAI API.

    Args:
        url: without ``/v1``.
        prompter: for servers that take conversations only.
        chat: asks ``/v1/chat/completions`` with texts, which has no place for an answer's first words, instead of
            ``/v1/completions`` with token ids.
        api_key: sent as a bearer token.
        parallel: requests at the same time.

    Raises:
        EndpointError: it does not say which model it has.
    """

    def __init__(self, url: str, prompter: Prompter, *, chat: bool, api_key: str | None, parallel: int):
        self._url, self._prompter, self._chat = url.rstrip("/"), prompter, chat
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._parallel = parallel
        try:
            self.model = str(self._ask("/v1/models")["data"][0]["id"])
        except (LookupError, TypeError) as error:
            raise EndpointError(f"{url}/v1/models lists no model") from error

    def answers(self, prompts: Sequence[Prompt]) -> list[Answer]:
        """Raises EndpointError where a request fails."""
        with ThreadPoolExecutor(self._parallel) as threads:
            return list(threads.map(self._one, prompts))

    def _one(self, prompt: Prompt) -> Answer:
        body: dict[str, Any] = {"model": self.model, "max_tokens": prompt.new_tokens, "temperature": 0}
        try:
            if self._chat:
                messages = self._prompter.messages(prompt.question)
                reply = self._ask("/v1/chat/completions", body | {"messages": messages})
                text = reply["choices"][0]["message"]["content"]
            else:
                text = self._ask("/v1/completions", body | {"prompt": prompt.ids})["choices"][0]["text"]
            return Answer(text="" if text is None else str(text))  # null: the tokens ended before the answer began
        except (LookupError, TypeError) as error:
            raise EndpointError(f"{self._url} answers in another form than OpenAI's API") from error

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        if not self._url.startswith(("http://", "https://")):
            raise EndpointError(f"url={self._url} is no HTTP address: begin it with http:// or https://")
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self._url + path, data, self._headers)
            with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            raise EndpointError(f"{self._url}{path} answers {error.code}: {_beginning(error)}") from error
        except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
            raise EndpointError(f"{self._url}{path} can't be read: {error or repr(error)}") from error


def _beginning(answer: urllib.error.HTTPError) -> str:
    try:
        return answer.read(500).decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return ""
