"""Columns of the published data set: their names, and the order of their values."""

from __future__ import annotations

CLASSES = ("QCD", "tt", "W+jets")

# Features of a particle, in the order of the columns of GRU_input.
PARTICLE_FEATURES = (
    *("energy", "px", "py", "pz", "pt", "eta", "phi"),
    *("vertex_x", "vertex_y", "vertex_z"),
    *("charged_isolation", "photon_isolation", "neutral_isolation"),
    *("is_charged_hadron", "is_neutral_hadron", "is_photon", "is_electron", "is_muon"),
    "charge",
)
# Features of an event, in the order of HLF_input.
HIGH_LEVEL_FEATURES = (
    *("ht", "met", "met_phi", "mt", "jets", "b_jets"),
    *("lepton_pt", "lepton_eta", "lepton_phi"),
    *("lepton_charged_isolation", "lepton_photon_isolation", "lepton_neutral_isolation"),
    *("lepton_charge", "lepton_is_electron"),
)
# One lepton, 450 charged hadrons, 150 photons and 200 neutral hadrons.
MOST_OF_KIND = (450, 200, 150)
PARTICLES = 1 + sum(MOST_OF_KIND)

HLF, GRU, LABEL = "HLF_input", "GRU_input", "encoded_label"
