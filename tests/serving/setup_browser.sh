#!/usr/bin/env bash
# A Chromium for the tests of `dflash report`: Debian's, unless one is installed or $CHROMIUM names one.
set -euo pipefail
for name in "${CHROMIUM:-}" chromium chromium-browser google-chrome chrome; do
  if [ -n "$name" ] && command -v "$name" > /dev/null; then
    exit 0
  fi
done
if ! command -v apt-get > /dev/null; then
  echo "install Chromium, or set CHROMIUM to the path of one" >&2
  exit 1
fi
SUDO=()
if [ "$(id -u)" != 0 ]; then SUDO=(sudo); fi
"${SUDO[@]}" apt-get update --quiet
DEBIAN_FRONTEND=noninteractive "${SUDO[@]}" apt-get install --quiet --yes --no-install-recommends chromium fonts-dejavu-core
