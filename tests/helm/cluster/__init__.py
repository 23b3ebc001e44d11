# SPDX-License-Identifier: Apache-2.0
"""A Kubernetes API to install a chart on: real HTTP for a real ``helm`` and ``kubectl``, strict schemas, and
controllers that do what decides whether an upgrade ends: a Deployment's strategy, GPUs, volumes of one node.

There is no kubelet: containers do not run. What they would do is tried in tests/docker.
"""
