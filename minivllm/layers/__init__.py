"""The building blocks that every model is made of: norms, rotary embedding, linear and vocabulary layers.

Shapes, with T the tokens of all scheduled requests laid end to end (there is no batch dimension):

    hidden states  [T, hidden_size]
    positions      [T] int64, the index of each token in its own request
    heads          [T, num_heads, head_dim]

Invariants: parameters never require grad; a layer never looks at which request a token belongs to (only
attention does); the dtype and device of a layer are those in force when it is built.
"""
