"""The endpoints under ``/v1`` in OpenAI's form: what a request may say, and what is answered.

``requests.py`` and ``responses.py`` are the bodies; ``sampling.py`` turns one into ``SamplingParams``;
``completions.py`` and ``chat.py`` are the endpoints.
"""
