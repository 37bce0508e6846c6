"""The pipeline runtime: one loop over the instruction streams, on torch.distributed and torchrun.

run, launch, watch, hung      the launcher: from a plan to a report, over processes that it starts and watches
start, rank                   the process of one rank, from its start to its final report
executor                      the loop: one instruction after the other
stage, weights, module_state  a stage's state: blocks and graphs, weight versions (weight stashing), buffers
mail, among_stages            the messages between stages, and their reductions before an update
checkpoint, manifest          the files from which a run resumes
job, status, recorder, measured, feed    the ranks' settings, reports, measurements and data
"""
