//! Tests forms through the public API: which texts match them, and that random output matches.

#[cfg(test)]
mod calls;
#[cfg(test)]
mod forms;
#[cfg(test)]
mod memory;
#[cfg(test)]
mod nesting;
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
#[cfg(test)]
mod trials;
