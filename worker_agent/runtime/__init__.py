"""The pipeline runtime: one loop over the instruction streams, on torch.distributed and torchrun.

run, launch, watch, hung      the launcher: from a plan to a report, over processes that it starts and watches
start, rank                   the process of one rank, from its start to its final report
executor                      the loop: one instruction after the other
stage, weights, module_state  what a stage holds: blocks and graphs, weight versions (weight stashing), buffers
mail, among_stages            what stages send each other, and what they agree on before an update
checkpoint, manifest          what a run leaves to be resumed from
job, status, recorder, measured, feed    what ranks need to know, report, measure, and read
"""
