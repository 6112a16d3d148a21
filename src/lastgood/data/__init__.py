"""The order of the samples, the loader that resumes in it, and the audit of the samples trained. Imports torch."""
