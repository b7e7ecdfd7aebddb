#!/bin/sh
# The server with curl alone.
#
#     enginewire serve
#     sh examples/curl.sh [http://127.0.0.1:8000]
set -eu
url=${1:-http://127.0.0.1:8000}

curl --silent --fail "$url/v1/models"
echo

curl --silent --fail "$url/v1/chat/completions" \
    --header 'Content-Type: application/json' \
    --data '{"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 16, "temperature": 0}'
echo

# --no-buffer shows the events as they come.
curl --silent --fail --no-buffer "$url/v1/completions" \
    --header 'Content-Type: application/json' \
    --data '{"prompt": "Once upon a time", "max_tokens": 8, "stream": true}'

curl --silent --fail "$url/metrics" | grep '^vllm:generation_tokens_total'
