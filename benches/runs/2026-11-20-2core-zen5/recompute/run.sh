#!/bin/bash
# Alternating rounds: the commit before (b) and this one (a), with each choice.
cd "$(dirname "$0")" # `before` and `after` are the two binaries
format=$1; rounds=$2; steps=$3
for r in $(seq $rounds); do
  for c in "b-none before" "b-block before --recompute" "a-none after --recompute none" "a-mlp after --recompute mlp" "a-block after --recompute block"; do
    set -- $c; name=$1; bin=$2; shift 2
    ./$bin bench train --shape 5m --formats $format --steps $steps --json "$@" | sed "s/^/$name $r /" >> raw-$format.txt
  done
done
