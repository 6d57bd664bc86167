//! Forms as their users see them: which texts fit, and that whatever is drawn at random fits.

#[cfg(test)]
mod calls;
#[cfg(test)]
mod forms;
#[cfg(test)]
mod memory;
#[cfg(test)]
mod prefaces;
#[cfg(test)]
mod refusals;
#[cfg(test)]
mod schemas;
#[cfg(test)]
mod support;
#[cfg(test)]
mod tags;
