# CPU:  docker build -t mava .
# CUDA: docker build -t mava --build-arg EXTRA=cuda13 .   (the driver comes from the host)
FROM python:3.12-slim

ARG EXTRA=""

WORKDIR /mava
COPY pyproject.toml requirements.txt README.md LICENSE ./
COPY mava mava
RUN pip install --no-cache-dir --constraint requirements.txt --editable ".${EXTRA:+[$EXTRA]}"
COPY . .

ENTRYPOINT ["python"]
CMD ["mava/systems/ff_mappo.py"]
