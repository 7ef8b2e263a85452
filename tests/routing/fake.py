"""An instance of vLLM without a model: its answer to a prompt of letters is the alphabet that follows them."""

import asyncio
import contextlib
import json

import httpx

from snapstream.routing.app import create_app

END = 26


def letter(token):
    return chr(ord("a") + token)


class Instance:
    """What it was asked, and how it is."""

    def __init__(self, reads=False, decodes=False):
        self.reads, self.decodes = reads, decodes
        self.asked, self.is_well, self.fails, self.breaks_at, self.closed = [], True, 0, None, 0
        self.refuses_caches = self.loses_caches = False
        self.delay = 0.0

    async def answer(self, request):
        if request.url.path == "/health":
            return httpx.Response(200 if self.is_well else 503)
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "letters", "max_model_len": 40}]})
        body = json.loads(request.content)
        self.asked.append((request.url.path, body, dict(request.headers)))
        await asyncio.sleep(self.delay)
        if self.fails:
            self.fails -= 1
            return httpx.Response(500, json={"error": "tired"})
        if body["model"] != "letters":
            return httpx.Response(404, json={"error": {"message": "no such model"}})
        transfer = body.get("kv_transfer_params") or {}
        tokens = self.tokens(body)
        if transfer.get("do_remote_prefill"):
            assert self.decodes
            assert transfer["length"] == len(tokens) - 1
            if self.refuses_caches:
                return httpx.Response(400, json={"error": {"message": "the cache cannot be transferred"}})
            if self.loses_caches and body.get("stream"):
                return stream(self, iter([{"error": {"message": "no cache"}}]))
            if self.loses_caches:
                return httpx.Response(500, json={"error": {"message": "no cache"}})
        made = [(tokens[-1] + 1 + n) % END for n in range(body["max_tokens"])]
        finish = "length"
        for n in range(len(made)):
            text = "".join(map(letter, made[: n + 1]))
            found = [stop for stop in body.get("stop") or () if stop in text]
            if found:
                made, finish = made[: n + 1], "stop"
                break
        text = "".join(map(letter, made))
        if finish == "stop":
            text = text[: text.index(found[0])]
        usage = {"prompt_tokens": len(tokens), "completion_tokens": len(made)}
        if body.get("stream"):
            return stream(self, self.chunks(body, text, finish, usage))
        choice = {"index": 0, "finish_reason": finish, "token_ids": made}
        is_chat = "chat" in request.url.path
        choice |= {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        whole = {"id": "x", "model": "letters", "choices": [choice], "usage": usage, "prompt_token_ids": tokens}
        if transfer.get("do_remote_decode"):
            assert self.reads
            assert body["max_tokens"] == 1
            if finish == "length":
                whole["kv_transfer_params"] = {"do_remote_prefill": True, "length": len(tokens), "key": "k"}
        return httpx.Response(200, json=whole)

    def tokens(self, body):
        prompt = body.get("prompt")
        if prompt is None:
            prompt = "".join(message["content"] for message in body["messages"])
        return prompt if isinstance(prompt, list) else [ord(one) - ord("a") for one in prompt]

    def chunks(self, body, text, finish, usage):
        for n, one in enumerate(text or [""]):
            if n == self.breaks_at:
                raise httpx.ReadError("broken off")
            said = {"prompt_tokens": usage["prompt_tokens"], "completion_tokens": n + 1}
            is_last = n >= len(text) - 1
            yield {"choices": [{"text": one, "finish_reason": finish if is_last else None}], "usage": said}


def stream(instance, chunks):
    class Body(httpx.AsyncByteStream):
        async def __aiter__(self):
            for chunk in chunks:
                yield f"data: {json.dumps(chunk)}\n\n".encode()
                await asyncio.sleep(instance.delay)
            yield b"data: [DONE]\n\n"

        async def aclose(self):
            instance.closed += 1

    return httpx.Response(200, stream=Body(), headers={"content-type": "text/event-stream"})


@contextlib.asynccontextmanager
async def client_of(settings, transport, **options):
    """A client of a router that reaches its instances by a transport."""
    app = create_app(settings, transport)
    async with app.router.lifespan_context(app):
        asgi = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=asgi, base_url="http://router", **options) as client:
            client.proxy = app.state.proxy
            yield client


class Network(httpx.AsyncBaseTransport):
    """Instances by the name of their host; an unknown one does not answer."""

    def __init__(self, **instances):
        self.instances = instances

    async def handle_async_request(self, request):
        instance = self.instances.get(request.url.host)
        if instance is None:
            raise httpx.ConnectError("nobody there")
        response = await instance.answer(request)
        response.request = request
        return response
