#!/bin/bash
# Start the training again until it is done, on one machine where it can be killed. After a reboot,
# something must start this script again, for example cron's @reboot.
#
#   extras/launch/restart.sh --spawn --out run
#
# Run it in the folder that has run.py. All words are flags of run.py. If run.py ends with
#   1       failed, for example because a disk did not answer or another run uses the folder
#   3       stopped by a signal, and saved
#   >= 128  killed
# this script waits 10 seconds and starts run.py again, which resumes from the newest checkpoint. It
# ends with any other code, such as 0 (the training is done), 2 (a mistake in the flags, files or
# data, or the training diverged) or 127 (there is no python), and after Ctrl-C, when run.py has
# saved.
# This script does not pass SIGTERM on. To stop the training with SIGTERM, end this script first, and
# then send SIGTERM to run.py.
trap 'exit 130' INT

while true; do
  python run.py "$@"
  code=$?
  [ $code = 1 ] || [ $code = 3 ] || [ $code -ge 128 ] || exit $code
  sleep 10
done
