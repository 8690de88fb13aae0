mod accounting;
mod pathologies;
mod residency;
mod sim;
