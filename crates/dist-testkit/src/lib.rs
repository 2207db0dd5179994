//! What the tests of every crate share.

pub mod oracle;
