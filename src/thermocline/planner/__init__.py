"""`thermocline plan`: what a training costs on a machine or cluster, from figures measured or given."""
