//! The definitions and the string literals of a Rust file.

use proc_macro2::{Spacing, TokenStream, TokenTree};
use syn::visit::{self, Visit};

/// The kind of thing that a definition defines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A struct, an enum, a union, a trait or a type alias.
    Type,
    Variant,
    Field,
    /// A function or a method.
    Function,
    Module,
}

/// A name where it is defined.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Definition {
    pub(super) kind: Kind,
    pub(super) name: String,
    pub(super) line: usize,
}

/// A string literal and the line on which it begins.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Literal {
    pub(super) text: String,
    pub(super) line: usize,
}

/// The names and texts that one file defines. Bodies of functions have literals and no definitions, and neither have
/// macros.
#[derive(Debug, Default)]
pub(super) struct Definitions {
    pub(super) names: Vec<Definition>,
    pub(super) literals: Vec<Literal>,
}

impl Definitions {
    /// Reads a file. The error is the line and the message of the parser.
    pub(super) fn read(text: &str) -> Result<Self, (usize, String)> {
        let mut all = Self::default();
        let tokens: TokenStream = text
            .parse()
            .map_err(|error: proc_macro2::LexError| (error.span().start().line, error.to_string()))?;
        all.add_literals(tokens.clone());
        let file: syn::File =
            syn::parse2(tokens).map_err(|error| (error.span().start().line, error.to_string()))?;
        all.visit_file(&file);
        Ok(all)
    }

    /// Adds the strings among these tokens, except the comments that the lexer gives as `doc = "…"`.
    fn add_literals(&mut self, tokens: TokenStream) {
        let mut is_doc = [false; 2];
        for token in tokens {
            let follows_doc = is_doc[0];
            is_doc[0] = is_doc[1]
                && matches!(&token, TokenTree::Punct(it) if it.as_char() == '=' && it.spacing() == Spacing::Alone);
            is_doc[1] = matches!(&token, TokenTree::Ident(name) if name == "doc");
            match token {
                TokenTree::Group(group) => self.add_literals(group.stream()),
                TokenTree::Literal(literal) if !follows_doc => {
                    let line = literal.span().start().line;
                    if let syn::Lit::Str(text) = syn::Lit::new(literal) {
                        self.literals.push(Literal { text: text.value(), line });
                    }
                }
                _ => {}
            }
        }
    }

    fn add(&mut self, kind: Kind, name: &syn::Ident) {
        self.names.push(Definition { kind, name: name.to_string(), line: name.span().start().line });
    }
}

impl<'a> Visit<'a> for Definitions {
    fn visit_item_struct(&mut self, item: &'a syn::ItemStruct) {
        self.add(Kind::Type, &item.ident);
        visit::visit_item_struct(self, item);
    }

    fn visit_item_enum(&mut self, item: &'a syn::ItemEnum) {
        self.add(Kind::Type, &item.ident);
        visit::visit_item_enum(self, item);
    }

    fn visit_item_union(&mut self, item: &'a syn::ItemUnion) {
        self.add(Kind::Type, &item.ident);
        visit::visit_item_union(self, item);
    }

    fn visit_item_trait(&mut self, item: &'a syn::ItemTrait) {
        self.add(Kind::Type, &item.ident);
        visit::visit_item_trait(self, item);
    }

    fn visit_item_type(&mut self, item: &'a syn::ItemType) {
        self.add(Kind::Type, &item.ident);
    }

    fn visit_item_mod(&mut self, item: &'a syn::ItemMod) {
        self.add(Kind::Module, &item.ident);
        visit::visit_item_mod(self, item);
    }

    fn visit_signature(&mut self, signature: &'a syn::Signature) {
        self.add(Kind::Function, &signature.ident);
    }

    fn visit_variant(&mut self, variant: &'a syn::Variant) {
        self.add(Kind::Variant, &variant.ident);
        visit::visit_variant(self, variant);
    }

    fn visit_field(&mut self, field: &'a syn::Field) {
        if let Some(name) = &field.ident {
            self.add(Kind::Field, name);
        }
    }

    fn visit_block(&mut self, _: &'a syn::Block) {}
    fn visit_expr(&mut self, _: &'a syn::Expr) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_definition_is_read_with_its_line() {
        let text = "mod a {\n    struct B {\n        c: u8,\n    }\n}\nenum D {\n    E { f: u8 },\n}\ntrait G {\n    fn h();\n}\n\
                    type I = u8;\nfn j() {\n    struct Local;\n}\nimpl B {\n    fn k(l: u8) {}\n}\n";
        let names = Definitions::read(text).unwrap().names;
        let found: Vec<_> = names.iter().map(|it| (it.kind, it.name.as_str(), it.line)).collect();
        let expected = [
            (Kind::Module, "a", 1),
            (Kind::Type, "B", 2),
            (Kind::Field, "c", 3),
            (Kind::Type, "D", 6),
            (Kind::Variant, "E", 7),
            (Kind::Field, "f", 7),
            (Kind::Type, "G", 9),
            (Kind::Function, "h", 10),
            (Kind::Type, "I", 12),
            (Kind::Function, "j", 13),
            (Kind::Function, "k", 17),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn literals_are_read_wherever_they_stand_and_comments_are_not() {
        let text =
            "//! No.\n/// No.\n#[error(\"yes\")]\nfn f() {\n    // \"no\"\n    panic!(\"two {}\", 'c');\n}\n";
        let literals = Definitions::read(text).unwrap().literals;
        let found: Vec<_> = literals.iter().map(|it| (it.text.as_str(), it.line)).collect();
        assert_eq!(found, [("yes", 3), ("two {}", 6)]);
    }

    #[test]
    fn a_file_that_is_no_rust_is_an_error_with_its_line() {
        assert_eq!(Definitions::read("fn f() {}\nfn {}\n").unwrap_err().0, 2);
    }
}
