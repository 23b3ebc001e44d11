# SPDX-License-Identifier: Apache-2.0
"""Grafana's dashboards as Python: one module each; ``python -m dashboards`` writes them into the chart."""
