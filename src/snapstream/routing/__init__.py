"""A router before instances of vLLM that read prompts and others that decode them: OpenAI's routes, one address.

It knows HTTP and nothing of models; caches pass it by (``integrations/vllm/connector.py``).
"""
