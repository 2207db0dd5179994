//! Algorithms for ranks that share memory.

use std::fmt;

use dist_algos::direct::{Form, Task};

use crate::Operation;

/// How an operation is done by ranks that share memory: not by messages, but each in the memory of the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Direct {
    operation: Operation,
    form: Form,
}

impl Direct {
    /// Every form that an operation can be done in.
    pub fn of(operation: Operation) -> impl Iterator<Item = Self> {
        let task = Task::all(0).into_iter().find(|task| task.name() == operation.name());
        let forms = Form::ALL.into_iter().filter(move |form| task.is_some_and(|task| form.serves(task)));
        forms.map(move |form| Self { operation, form })
    }

    pub(crate) const fn new(operation: Operation, form: Form) -> Self {
        Self { operation, form }
    }

    /// The operation that this is an algorithm of.
    pub const fn operation(self) -> Operation {
        self.operation
    }

    /// The form.
    pub const fn form(self) -> Form {
        self.form
    }

    /// The name, unique among the algorithms of its operation.
    pub const fn name(self) -> &'static str {
        match self.form {
            Form::OneShot => "direct/one_shot",
            Form::Staged => "direct/staged",
            Form::ReadFromAll => "direct/read_from_all",
            Form::WriteToAll => "direct/write_to_all",
            _ => "direct",
        }
    }
}

impl fmt::Display for Direct {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
