//! Error sources for all crates, and the debug form of errors in panic messages.

use std::error::Error;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use crate::Chain;

/// The error that caused another one, in the size of a pointer.
///
/// [`Error::source`] of an error with this field returns the error itself, which `downcast_ref` finds. For a
/// `Box` field it would return the box.
pub struct ErrorSource<E>(Arc<E>);

impl<E> Clone for ErrorSource<E> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<E> From<E> for ErrorSource<E> {
    fn from(error: E) -> Self {
        Self(Arc::new(error))
    }
}

impl<E> Deref for ErrorSource<E> {
    type Target = E;

    fn deref(&self) -> &E {
        &self.0
    }
}

impl<E> AsRef<E> for ErrorSource<E> {
    fn as_ref(&self) -> &E {
        &self.0
    }
}

impl<E: fmt::Debug> fmt::Debug for ErrorSource<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl<E: fmt::Display> fmt::Display for ErrorSource<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Defines the error enum of a crate. Its `Debug` shows the message and its sources, and on the next line the
/// variant and its fields; `unwrap` prints this.
#[doc(hidden)]
#[macro_export]
macro_rules! error_enum {
    ($($item:tt)*) => {
        // The tokens are passed on unparsed: thiserror does not recognise the type of a field that a macro
        // has parsed.
        $($item)*
        $crate::debug_of_error_enum! { $($item)* }
    };
}

/// Implements `Debug` for [`error_enum`].
#[doc(hidden)]
#[macro_export]
macro_rules! debug_of_error_enum {
    (
        $(#[$attribute:meta])*
        $visibility:vis enum $name:ident {
            $(
                $(#[doc = $doc:expr])*
                $(#[cfg($($condition:tt)*)])?
                #[error($($message:tt)*)]
                $variant:ident
                $(( $(#[$only_attribute:meta])* $only:ty ))?
                $({ $( $(#[$field_attribute:meta])* $field:ident: $type:ty ),+ $(,)? })?
            ),+ $(,)?
        }
    ) => {
        impl ::std::fmt::Debug for $name {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                match self {
                    $(
                        $(#[cfg($($condition)*)])?
                        Self::$variant $(( $crate::name_of_field!(only: $only) ))? $({ $($field),+ })? => {
                            let fields: &[(&str, &dyn ::std::fmt::Debug)] = &[
                                $(("", $crate::name_of_field!(only: $only)))?
                                $($((stringify!($field), $field)),+)?
                            ];
                            $crate::show_error(f, self, stringify!($variant), fields)
                        }
                    )+
                }
            }
        }
    };
}

/// Returns the name under which [`error_enum`] binds the only field of a tuple variant.
#[doc(hidden)]
#[macro_export]
macro_rules! name_of_field {
    ($name:ident: $type:ty) => {
        $name
    };
}

/// Formats an error as [`error_enum`] describes. A field without a name is the only one.
#[doc(hidden)]
pub fn show_error(
    f: &mut fmt::Formatter<'_>,
    error: &(dyn Error + 'static),
    variant: &str,
    fields: &[(&str, &dyn fmt::Debug)],
) -> fmt::Result {
    writeln!(f, "{}", Chain(error))?;
    match fields {
        [] => f.write_str(variant),
        [("", only)] => f.debug_tuple(variant).field(only).finish(),
        fields => {
            let mut shown = f.debug_struct(variant);
            fields.iter().for_each(|(name, value)| {
                shown.field(name, value);
            });
            shown.finish()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    error_enum! {
        /// An error with each kind of variant.
        #[derive(thiserror::Error)]
        enum Sample {
            /// No field.
            #[error("nothing is there")]
            Nothing,
            /// Left out.
            #[cfg(any())]
            #[error("this is left out")]
            LeftOut(usize),
            /// Named fields.
            #[error("rank {rank} is late")]
            Late {
                /// The rank.
                rank: usize,
                /// The cause.
                source: ErrorSource<Inner>,
            },
            /// One field without a name.
            #[error("it failed")]
            Failed(#[source] ErrorSource<Inner>),
        }
    }

    #[derive(Debug, PartialEq, Eq, thiserror::Error)]
    #[error("no more memory")]
    struct Inner {
        bytes: usize,
    }

    #[test]
    fn unwrap_shows_the_message_with_its_causes_and_then_the_fields() {
        let inner = || Inner { bytes: 8 }.into();
        let shown = |error: Sample| format!("{error:?}");
        assert_eq!(shown(Sample::Nothing), "nothing is there\nNothing");
        assert_eq!(
            shown(Sample::Late { rank: 2, source: inner() }),
            "rank 2 is late: no more memory\nLate { rank: 2, source: Inner { bytes: 8 } }"
        );
        assert_eq!(shown(Sample::Failed(inner())), "it failed: no more memory\nFailed(Inner { bytes: 8 })");
    }

    #[test]
    fn a_search_of_the_chain_finds_the_error_and_not_a_box() {
        let error = Sample::Failed(Inner { bytes: 8 }.into());
        assert_eq!(error.source().unwrap().downcast_ref(), Some(&Inner { bytes: 8 }));
    }
}
