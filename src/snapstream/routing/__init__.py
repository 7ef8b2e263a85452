"""A router in front of vLLM prefill and decode instances: OpenAI's routes at one address.

It knows HTTP but nothing about models. Caches are transferred directly between the instances
(``integrations/vllm/connector.py``).
"""
