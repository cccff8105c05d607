"""Control calls to one SGLang server: what is not generation."""

from __future__ import annotations

from typing import Any

import httpx


class TransferError(RuntimeError):
    """A control call failed; the message holds what the server answered. `answered`: it did answer."""

    def __init__(self, message: str, *, answered: bool = True) -> None:
        super().__init__(message)
        self.answered = answered


class Control:
    """Control calls to one server. `ranks` is its tensor parallel size."""

    def __init__(self, url: str, ranks: int, limit: float) -> None:
        self.url, self.ranks = url, ranks
        self._client = httpx.Client(base_url=url, timeout=httpx.Timeout(limit, connect=10), trust_env=False)

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        """The answer of a call, {} where it is no JSON object. Raises TransferError."""
        return self._call("POST", path, json=body)

    def get(self, path: str) -> dict[str, Any]:
        return self._call("GET", path)

    def _call(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        try:
            reply = self._client.request(method, path, **more)
        except httpx.TransportError as error:
            why = f"{self.url}{path}: {type(error).__name__}: {error}"
            raise TransferError(why, answered=False) from error
        if reply.status_code != 200:
            raise TransferError(f"{self.url}{path} answered {reply.status_code}: {error_text(reply)}")
        content = reply.json() if "json" in reply.headers.get("content-type", "") else {}
        return content if isinstance(content, dict) else {}

    def close(self) -> None:
        self._client.close()


def error_text(reply: httpx.Response) -> str:
    """SGLang's own words, out of the three shapes in which it answers an error."""
    try:
        content = reply.json()
    except ValueError:
        return reply.text
    error = content.get("error", content.get("message", content)) if isinstance(content, dict) else content
    return str(error.get("message", error) if isinstance(error, dict) else error)
