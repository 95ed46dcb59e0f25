"""Drafters in the layouts of other clients, and back.

`zlab`, `transformers` and `speculators` each know one layout: its `config.json` and the names of its tensors.
`layouts` tells them apart by content, `folder` reads and writes, `card` is the README of an export. `give`
does `dflash export`, `take` does `dflash import`.
"""
