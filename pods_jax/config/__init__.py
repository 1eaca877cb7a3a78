"""What a run may say: kinds of fields, the sections, what each entry reads, and the way there from files and command line."""
