"""Mixture of experts: which experts a token goes to, and what they compute.

    router_logits [T, E]  --routing.py-->  weights [T, top_k], expert ids [T, top_k]
    hidden [T, H], weights, ids  --experts.py-->  sum over a token's experts of weight * expert(hidden)  [T, H]

layer.py puts both together with the experts that every token visits (shared experts).
"""
