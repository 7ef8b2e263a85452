"""A router in front of several servers: replicas, or vLLM instances for prefill and decode.

It knows HTTP but nothing about models. Between vLLM instances, caches are transferred directly
(``integrations/vllm/connector.py``).
"""
