#!/bin/sh
# Stands in for float8-tune where tuning at first use is tested. A database is a text file here, which
# `db export` prints; a sweep replaces it by the file beside it that ends in .measured. Calls are
# listed in the one that ends in .calls, and .status has the exit code of a sweep.
call="$*"
while [ $# -gt 0 ]; do
  [ "$1" = --db ] && db=$2
  shift
done
echo "$call" >> "$db.calls"
case $call in
  "db export --format table "*) cat "$db" ;;
  "sweep "*)
    [ -f "$db.hang" ] && exec sleep 100
    echo "a note that nobody needs" >&2
    [ -f "$db.status" ] && { echo "no device of this number" >&2; exit "$(cat "$db.status")"; }
    [ -f "$db.measured" ] && cp "$db.measured" "$db"
    ;;
esac
exit 0
