"""Train DFlash drafters: extract a target's hidden states once, train from them many times.

The map, from the top down (each line imports only what stands below it):

- `cli`, `commands`: the command line; `demo`: the whole job on a small real model;
  `recipe`: the whole job as a file describes it
- `report`: one page about trainings
- `evaluate`, `export`: what a drafter is worth; checkpoint layouts for other clients
- `extract`, `train`, `decode`: stage 1, stage 2, and speculative decoding
- `pretrained`: a drafter on disk, as servers load it
- `target`, `drafter`, `cache`: the frozen model, the network that is trained, the store between them
- `head`, `attention`, `taps`: what the drafter borrows from the target; how a block looks at its context;
  which layers are tapped
- `dist`, `provenance`, `progress`: process groups, run records, progress bars
- `world`, `files`, `errors`: values and small tools without dependencies
"""

__version__ = "0.1.0"
